"""What was made of an imported model, in lines for a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.torch_frontend.blocks import Stack
from graphtrain.torch_frontend.model import open_model
from graphtrain.torch_frontend.parity import known_parity

if TYPE_CHECKING:
    from graphtrain.config.schema import Imported


def describe(model: Imported, store: Path) -> Iterator[str]:
    """Which front end, which blocks are scanned, and whose axes were told by shape.

    Args:
        store: that may hold what a comparison with PyTorch found.
    """
    known = known_parity(model, store)
    if known is not None and known.strict and model.front_end == "auto":
        model = replace(model, front_end="strict")
    opened = open_model(model)
    if opened.strict:
        yield f"front end: strict, because {known.strict if known else opened.strict}"
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
