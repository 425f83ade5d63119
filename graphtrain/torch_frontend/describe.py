"""Summary of an imported model for a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.torch_frontend.blocks import Stack, UnrolledBlocks, list_lengths
from graphtrain.torch_frontend.expert_loops import unsorted_experts
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import stored_parity
from graphtrain.torch_frontend.staged_blocks import StagedBlocks, span

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel
    from sharding_rules.pipeline import Stages


def _blocks_text(blocks: Stack | UnrolledBlocks, length: int) -> str:
    """Return which blocks of a list of this length are traced how."""
    first, last = blocks.numbers[0], blocks.numbers[-1]
    which = f"{blocks.count} blocks" if blocks.count == length else f"blocks {first} to {last}"
    if first == last:
        which = f"block {first}"
    if isinstance(blocks, Stack):
        return f"{which} in one scan" + f", {blocks.period} at a time" * (blocks.period > 1)
    return f"{which} traced one by one, because {blocks.reason}"


def _stages_text(opened: OpenedModel, stages: Stages) -> Iterator[str]:
    """Yield which blocks are outside of the pipeline stages, and what that costs."""
    blocks = StagedBlocks.of(opened)
    if not blocks.outside:
        return
    held = blocks.stack.numbers
    largest = max(sum(stages.layers[number :: stages.stages]) for number in range(stages.stages))
    yield (
        f"pipeline stages: {span(held[0], held[-1])} of {blocks.stack.name}; "
        f"{', '.join(blocks.places())}, which every device stores and computes for 1/"
        f"{stages.stages} of the microbatches"
    )
    if blocks.outside > largest:
        yield (
            f"pipeline stages: the {blocks.outside} blocks outside of them are more than the "
            f"{largest} of a stage; fewer stages, or fsdp, take less memory"
        )


def describe(model: TorchModel, store: Path, stages: Stages | None) -> Iterator[str]:
    """Yield lines on the front end, the scanned blocks, and axes that were inferred from shapes.

    Args:
        model: settings.
        store: directory of the cache, which may have the model's parity record.
        stages: pipeline stages; None without.
    """
    parity = stored_parity(model, store)
    if parity is not None and parity.strict and model.front_end == "auto":
        model = replace(model, front_end="strict")
    opened = open_model(model)
    if opened.strict:
        yield f"front end: strict, because {parity.strict if parity else opened.strict}"
    lengths = list_lengths(opened.block_lists)
    for blocks in opened.block_lists:
        yield f"{blocks.name}: {_blocks_text(blocks, lengths[blocks.name])}"
    if stages is not None:
        yield from _stages_text(opened, stages)
    if kinds := unsorted_experts(opened.meta.module):
        yield (
            f"experts: all of them are computed for each token, because {' and '.join(kinds)} "
            "computes them by itself, and not by an implementation that transformers lets choose"
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
