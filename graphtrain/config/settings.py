"""The settings as data: their JSON schema, descriptions, and the values that each accepts."""

import ast
import io
import json
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from graphtrain.config import schema
from graphtrain.config.lines import KeyPath

Node = dict[str, Any]


def json_schema() -> Node:
    """Return the JSON schema (draft 2020-12) of a configuration file."""
    root_schema = _schema()
    _with_preset(root_schema["$defs"]["Model"])
    _with_directory(root_schema["$defs"]["Data"])
    return root_schema


def _schema() -> Node:
    """Return the JSON schema without presets and data directories."""
    root_schema = TypeAdapter(schema.Config).json_schema()
    root_schema["$defs"]["Config"] = {
        key: value for key, value in root_schema.items() if key != "$defs"
    }
    for name, table in root_schema["$defs"].items():
        for setting, node in table["properties"].items():
            node.pop("title", None)  # only the name again, capitalized
            _without_null(node)
            if meaning := meanings().get((name, setting)):
                node["description"] = meaning
    # Required of a Model, and set from the data by `load_config`.
    root_schema["$defs"]["Model"]["required"].remove("vocab")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "graphtrain configuration",
        "$ref": "#/$defs/Config",
        "$defs": root_schema["$defs"],
    }


def _with_preset(model: Node) -> None:
    """Add `preset`, which stands for settings of the model, so that none of them is required."""
    model["properties"]["preset"] = {
        "type": "string",
        "description": "a published model by name, or a .toml file with a [program.model]",
    }
    model["anyOf"] = [{"required": ["preset"]}, {"required": model.pop("required")}]


def _with_directory(data: Node) -> None:
    """Add `directory`, which stands for the datasets in it, so that `train` is not required."""
    data["properties"] = {
        "directory": {
            "type": "string",
            "description": "directory made by `data prepare`: stands for its train and validation",
        }
    } | data["properties"]
    data["anyOf"] = [{"required": ["directory"]}, {"required": data.pop("required")}]


def _without_null(node: Node) -> None:
    """Remove null from a node: TOML has none, and a setting without a value is omitted."""
    if "anyOf" in node:
        options = [option for option in node.pop("anyOf") if option != {"type": "null"}]
        node.update(options[0] if len(options) == 1 else {"anyOf": options})
    if "default" in node and node["default"] is None:
        del node["default"]


@cache
def known_settings() -> dict[KeyPath, Node]:
    """Return every table and setting by its path, with its part of the JSON schema."""
    root_schema = _schema()
    settings: dict[KeyPath, Node] = {}

    def visit(path: KeyPath, node: Node) -> None:
        if "oneOf" in node:  # the native model comes first
            tables = [
                root_schema["$defs"][option["$ref"].rpartition("/")[2]] for option in node["oneOf"]
            ]
            properties = {}
            for table in reversed(tables):
                properties |= table["properties"]
            node = tables[0] | {"properties": properties}
        if "$ref" in node:
            node = root_schema["$defs"][node["$ref"].rpartition("/")[2]]
        settings[path] = node
        for name, inner in node.get("properties", {}).items():
            visit((*path, name), inner)

    visit((), root_schema)
    del settings[()]
    return settings


def holds_settings(node: Node) -> bool:
    """Return whether a node contains settings: a table, or keys that the user names."""
    return "properties" in node or node.get("type") == "object"


def words(node: Node) -> str:
    """Describe the values that a setting accepts: `a whole number, at least 1, or "rest"`."""
    if "oneOf" in node:
        return "a table"
    if "anyOf" in node:
        return ", or ".join(words(option) for option in node["anyOf"])
    if "$ref" in node:
        return "a table"
    if "const" in node:
        return json.dumps(node["const"])
    if "enum" in node:
        *most, last = map(json.dumps, node["enum"])
        return f"{', '.join(most)} or {last}" if most else last
    if node.get("type") == "array":
        if "enum" in node["items"]:
            return f"an array of {words(node['items'])}"
        kind, comma, limit = words(node["items"]).removeprefix("a ").partition(", ")
        return f"an array of {kind}s" + (f", each {limit}" if comma else "")
    names = {
        "integer": "a whole number",
        "number": "a number",
        "string": "a string",
        "boolean": "true or false",
        "object": "a table",
    }
    bounds = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    limits = [f"{bound} {node[name]}" for name, bound in bounds.items() if name in node]
    return ", ".join([names[node["type"]], *limits])


@cache
def meanings() -> dict[tuple[str, str], str]:
    """Return the comment beside each field of the schema, by class and field.

    The comments are read from the source on first use, so that a description is written once and
    costs nothing at start-up. Empty if the sources are not installed.
    """
    comments: dict[tuple[str, str], str] = {}
    for file in sorted(Path(schema.__file__).parent.glob("*.py")):
        comments.update(_comments_beside_fields(file.read_text()))
    return comments


def _comments_beside_fields(source: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield class and field with the comment beside the field."""
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    tables = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)]
    for table in tables:
        for field in table.body:
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and (comment := comments.get(field.end_lineno or 0))
            ):
                yield (table.name, field.target.id), comment


def choices(node: Node) -> str:
    """Return the values of a setting that accepts named ones: `"auto", "flash" or "dense"`."""
    options = node.get("anyOf", [node])
    return words(node) if any("enum" in one or "const" in one for one in options) else ""


def description(path: KeyPath) -> str:
    """Return what a setting means and, if it accepts named values, which."""
    node = known_settings().get(path, {})
    texts = [node.get("description", ""), choices(node)]
    return "; ".join(text for text in texts if text)
