"""Summary of an imported model for a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.torch_frontend.blocks import Stack
from graphtrain.torch_frontend.model import open_model
from graphtrain.torch_frontend.parity import stored_parity

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel


def describe(model: TorchModel, store: Path) -> Iterator[str]:
    """Yield lines on the front end, the scanned blocks, and axes that were inferred from shapes.

    Args:
        model: settings.
        store: directory of the cache, which may have the model's parity record.
    """
    parity = stored_parity(model, store)
    if parity is not None and parity.strict and model.front_end == "auto":
        model = replace(model, front_end="strict")
    opened = open_model(model)
    if opened.strict:
        yield f"front end: strict, because {parity.strict if parity else opened.strict}"
    for block_list in opened.block_lists:
        if isinstance(block_list, Stack):
            period_text = f", {block_list.period} at a time" if block_list.period > 1 else ""
            yield f"{block_list.name}: {block_list.count} blocks in one scan{period_text}"
        else:
            yield (
                f"{block_list.name}: {block_list.count} blocks traced one by one, because "
                f"{block_list.reason}"
            )
    if names := sorted(opened.untrained):
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        yield f"{names[0]}{others}: get no gradient, so they stay as they are"
    specs = opened.specs()
    for path, names in opened.parameter_names_by_path().items():
        named = opened.axes[names[0]]
        if named.source == "shape" and len(named.axes) > 1:
            axes = ", ".join(axis or "unsharded" for axis in specs[path].axes)
            yield f"{path}: axes ({axes}) inferred from its shape; override by program.model.axes"
