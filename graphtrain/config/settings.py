"""The settings as data: their JSON schema, their meanings, and words for what they take."""

import ast
import inspect
import io
import json
import tokenize
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from graphtrain.config import schema
from graphtrain.config.lines import KeyPath

Node = dict[str, Any]


def json_schema() -> Node:
    """JSON schema (draft 2020-12) of a configuration file."""
    made = _schema()
    _with_preset(made["$defs"]["Model"])
    return made


def _schema() -> Node:
    """Of the settings alone, without presets."""
    made = TypeAdapter(schema.Config).json_schema()
    made["$defs"]["Config"] = {key: value for key, value in made.items() if key != "$defs"}
    for name, table in made["$defs"].items():
        for setting, node in table["properties"].items():
            node.pop("title", None)  # only the name again, capitalized
            _without_null(node)
            if meaning := meanings().get((name, setting)):
                node["description"] = meaning
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "graphtrain configuration",
        "$ref": "#/$defs/Config",
        "$defs": made["$defs"],
    }


def _with_preset(model: Node) -> None:
    """A preset is no setting: it stands for some, and then none is required."""
    model["properties"]["preset"] = {
        "type": "string",
        "description": "a published model by name, or a .toml file with a [program.model]",
    }
    model["anyOf"] = [{"required": ["preset"]}, {"required": model.pop("required")}]


def _without_null(node: Node) -> None:
    """TOML has no null: a setting without a value is left out."""
    if "anyOf" in node:
        options = [option for option in node.pop("anyOf") if option != {"type": "null"}]
        node.update(options[0] if len(options) == 1 else {"anyOf": options})
    if "default" in node and node["default"] is None:
        del node["default"]


@cache
def known_settings() -> dict[KeyPath, Node]:
    """Every table and setting by its path, with its part of the JSON schema."""
    made = _schema()
    known: dict[KeyPath, Node] = {}

    def visit(path: KeyPath, node: Node) -> None:
        if "oneOf" in node:  # native settings are the first
            tables = [made["$defs"][one["$ref"].rpartition("/")[2]] for one in node["oneOf"]]
            properties = {}
            for table in reversed(tables):
                properties |= table["properties"]
            node = tables[0] | {"properties": properties}
        if "$ref" in node:
            node = made["$defs"][node["$ref"].rpartition("/")[2]]
        known[path] = node
        for name, inner in node.get("properties", {}).items():
            visit((*path, name), inner)

    visit((), made)
    del known[()]
    return known


def holds_settings(node: Node) -> bool:
    """Whether there may be settings below one: tables, and those with names of the user's own."""
    return "properties" in node or node.get("type") == "object"


def words(node: Node) -> str:
    """What a setting takes: `a whole number, at least 1, or "rest"`."""
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
        return f"an array of {words(node['items']).removeprefix('a ')}s"
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

    They are read from the source when needed, so that a description is written once, beside its
    field, and starting up does not pay for it. Empty if the source is not installed.
    """
    try:
        sources = [inspect.getsource(module) for module in _schema_modules()]
    except OSError:
        return {}
    return {name: text for source in sources for name, text in _comments_beside_fields(source)}


def _schema_modules() -> list[ModuleType]:
    """Return the modules of the schema, one for each table."""
    found = (getattr(schema, name) for name in dir(schema))
    return [module for module in found if inspect.ismodule(module)]


def _comments_beside_fields(source: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the class and name of each field that has a comment on its last line, and that."""
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    tables = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for table in tables:
        for field in table.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if (line := field.end_lineno or 0) in comments:
                yield (table.name, field.target.id), comments[line]
