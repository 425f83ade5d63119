"""What was made of an imported model, in lines for a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphtrain.torch_models.blocks import Stack
from graphtrain.torch_models.model import open_model

if TYPE_CHECKING:
    from graphtrain.config.schema import Imported


def describe(model: Imported) -> Iterator[str]:
    """Which blocks are scanned, and whose axes were told by shape because no name is known."""
    opened = open_model(model)
    for one in opened.lists:
        if isinstance(one, Stack):
            every = f", {one.period} at a time" if one.period > 1 else ""
            yield f"{one.name}: {one.count} blocks in one scan{every}"
        else:
            yield f"{one.name}: {one.count} blocks one by one, since {one.reason}"
    specs = opened.specs()
    for path, names in opened.stored().items():
        named = opened.axes[names[0]]
        if named.by == "shape" and len(named.axes) > 1:
            axes = ", ".join(axis or "whole" for axis in specs[path].axes)
            yield f"{path}: ({axes}) by its shape; program.model.axes can say otherwise"
