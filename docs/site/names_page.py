"""The names that other tools have for settings."""

from markdown import table

from graphtrain.config.foreign_names import NAMES_OF, conversion

HEAD = """# Names in other tools

A configuration that uses a name of another tool, or an earlier name of a setting, is refused
with the name to write:

```text
error: a.toml:6: unknown setting program.model.hidden_size; hidden_size is program.model.embed
```

These are the names that it knows, from transformers, TRL, PEFT, MaxText, torchtitan, Megatron-LM,
NeMo and MindFormers. Where the unit differs, the message and the second table
say how to convert. The pages under *Coming from*
([MaxText](../guides/coming-from/maxtext.md), [torchtitan](../guides/coming-from/torchtitan.md) and
others) say what differs.

"""


def page() -> str:
    """Return the page."""
    rows = [
        (f"`{setting}`", ", ".join(f"`{name}`" for name in sorted(names.split())))
        for setting, names in NAMES_OF.items()
    ]
    setting_of = {name: setting for setting, names in NAMES_OF.items() for name in names.split()}
    units = [
        (f"`{name}`", f"`{setting_of[name]}`", conversion(name))
        for name in sorted(setting_of)
        if conversion(name)
    ]
    return (
        HEAD
        + table(("setting", "called elsewhere"), rows)
        + "\n## Other units\n\n"
        + table(("name", "setting", "conversion"), units)
    )
