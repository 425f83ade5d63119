"""The names that other tools have for settings."""

from markdown import table

from graphtrain.config.foreign_names import NAMES_OF

HEAD = """# Names in other tools

A configuration that uses a name of another tool, or an earlier name of a setting, is refused
with the name to write:

```text
error: a.toml:6: unknown setting program.model.hidden_size; hidden_size is program.model.embed
```

These are the names that it knows, from transformers, TRL, PEFT, MaxText, torchtitan, Megatron-LM,
NeMo and MindFormers. A similar name does not always have the same unit: `per_device_batch_size`
counts sequences of one device, `global_batch_size` those of all. The pages under *Coming from*
([MaxText](../guides/coming-from/maxtext.md), [torchtitan](../guides/coming-from/torchtitan.md) and
others) say what differs.

"""


def page() -> str:
    """Return the page."""
    rows = [
        (f"`{setting}`", ", ".join(f"`{name}`" for name in sorted(names.split())))
        for setting, names in NAMES_OF.items()
    ]
    return HEAD + table(("setting", "called elsewhere"), rows)
