"""The reference of model presets and of sharding strategies."""

from pathlib import Path
from typing import Any

from markdown import table

import sharding_rules
from graphtrain.config import presets
from graphtrain.config.presets import preset_settings
from sharding_rules.documents import read_toml

HEAD = """# Presets

## Models

`preset = "NAME"` in `[program.model]` stands for the settings of a published model; settings
beside it override it. The table shows the sizes. `graphtrain config show` prints everything. How
they were checked is under [published models by
name](../guides/weights.md#published-models-by-name).

"""
SHARDING = """
## Sharding strategies

`program.rules` lists strategies by name. [Sharding](../guides/sharding.md) explains how they
combine.

"""


def page() -> str:
    """Return the page."""
    names = read_toml(Path(presets.__file__).with_name("presets.toml"))
    rows = [_model(name, one["parameters"], preset_settings(name)) for name, one in names.items()]
    head = ("preset", "parameters", "layers", "embed", "heads", "kv_heads", "mlp", "vocab")
    return HEAD + table(head, rows) + SHARDING + "\n".join(_strategies())


def _model(name: str, parameters: float, settings: dict[str, Any]) -> tuple[str, ...]:
    billions = parameters / 1e9 if isinstance(parameters, int) else parameters
    count = f"{billions:.3g} B" if billions >= 0.9995 else f"{billions * 1000:.0f} M"
    sizes = (settings.get(key) for key in ("layers", "embed", "heads", "kv_heads", "mlp", "vocab"))
    return (f"`{name}`", count, *("" if size is None else f"{size:,}" for size in sizes))


def _strategies() -> list[str]:
    files = sorted((Path(sharding_rules.__file__).parent / "presets").glob("*.toml"))
    return [f"### {file.stem}\n\n```toml\n{file.read_text().strip()}\n```\n" for file in files]
