"""The reference of all settings, as a Markdown page made from the schema."""

import re
from collections.abc import Iterator

from graphtrain.config.render import dotted, toml
from graphtrain.config.settings import Node, json_schema, known_settings, words

_LINK = re.compile(r"docs/([a-z-]+/)?([\w-]+)\.md")
_HEAD = """# Settings

Every setting of a configuration file, made from the code by `graphtrain config reference`. A
setting under `[program]` can change compiled code; a setting under `[run]` cannot. A setting that
is not required and has no default is unset. `[program.model]` with `torch` or `hf` describes a
PyTorch or Hugging Face model, with `flax` a Flax module, else the native model. `preset` replaces
the required settings of the native model. `vocab` is required only without training data that
states it.
"""


def reference() -> str:
    """Return a Markdown page with a table of settings for each table of a configuration file."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    definitions = json_schema()["$defs"]
    yield _HEAD
    for path, node in known_settings().items():
        if path == ("program", "model"):
            yield from _table("[program.model]", definitions["Model"])
            yield from _table("[program.model] with torch or hf", definitions["TorchModel"])
            yield from _table("[program.model] with flax", definitions["FlaxModel"])
        elif path == ("program",):
            yield from _table("[program]", node)
            yield from _table("[[program.phase]]", definitions["Phase"])
        elif path == ("run", "data"):
            yield from _table("[run.data]", definitions["Data"])
            yield from _table("[[run.data.train]] of a blend", definitions["BlendPart"])
        elif "properties" in node:
            yield from _table(f"[{dotted(path)}]", node)


def _table(title: str, node: Node) -> Iterator[str]:
    yield f"## {title}\n"
    yield node["description"].partition("\n")[0] + "\n"
    yield "| setting | accepts | default | meaning |"
    yield "|---|---|---|---|"
    for name, inner in node["properties"].items():
        accepts = words(inner)
        if accepts != "a table" or "type" in inner:  # other tables have a section of their own
            default = "required" if name in node.get("required", ()) else ""
            if inner.get("default", {}) != {}:
                default = f"`{toml(inner['default'])}`"
            meaning = _LINK.sub(r"[\2](../\1\2.md)", inner.get("description", ""))
            yield f"| `{name}` | {accepts} | {default} | {meaning} |"
    yield ""
