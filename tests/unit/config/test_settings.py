"""The JSON schema and the words made of it. No validator is installed: its structure is checked."""

from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

from graphtrain.config import Config
from graphtrain.config.settings import json_schema, known_settings, meanings, words


def paths_of(table, prefix=()):
    """Every table and setting, from the dataclasses themselves."""
    hints = get_type_hints(table)
    for field in fields(table):
        yield (*prefix, field.name)
        for inner in (hints[field.name], *get_args(hints[field.name])):
            if is_dataclass(inner):
                yield from paths_of(inner, (*prefix, field.name))


def test_every_setting_is_known_and_can_be_described():
    assert set(known_settings()) == set(paths_of(Config))
    assert all(words(node) for node in known_settings().values())


def test_a_list_of_named_values_lists_them():
    node = known_settings()["program", "precision", "exclude"]
    options = node.get("anyOf", [node])
    assert words(options[0]).startswith('an array of "query", "key", "value"')


def test_the_schema_is_one_for_editors():
    made = json_schema()
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert made["$ref"] == "#/$defs/Config"
    model = made["$defs"]["Model"]
    assert model["additionalProperties"] is False
    sizes = ["layers", "embed", "heads", "mlp"]  # the data states the vocabulary
    assert model["anyOf"] == [{"required": ["preset"]}, {"required": sizes}]
    data = made["$defs"]["Data"]
    assert data["anyOf"] == [{"required": ["directory"]}, {"required": ["train"]}]
    assert model["properties"]["kv_heads"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 10_000_000,
        "description": "number of key and value heads; unset: as many as heads",
    }
    assert made["$defs"]["Batch"]["description"] == "The global batch of one training step."
    assert "null" not in str(made)


def test_the_schema_takes_every_setting_of_a_file():
    file = {"program": {"mesh": {"fsdp": "rest"}, "model": {"layers": 2}}, "run": {"steps": 10}}
    made = json_schema()

    def check(value, node):
        node = node.get("oneOf", [node])[0]  # of models, the native
        node = made["$defs"].get(node.get("$ref", "").rpartition("/")[2], node)
        if isinstance(value, dict):
            for name, inner in value.items():
                check(inner, node["properties"][name])
        else:
            kinds = [option["type"] for option in node.get("anyOf", [node])]
            assert {int: "integer", str: "string"}[type(value)] in kinds

    check(file, made)


def test_meanings_are_the_comments_beside_the_fields():
    assert meanings()["Batch", "seq_len"] == "tokens per sequence"
    assert ("Program", "mesh") not in meanings()
