"""The part of a module's forward pass before its pipeline stages, and the part after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.scan import Scan, ScanHooks
from graphtrain.torch_frontend.staged_blocks import StagedBlocks
from lowering.tracing.recording import recording_later

Arrays = dict[str, Any]


class _StopForward(Exception):
    """Signal that stops a module's forward pass once the wanted value is known."""

    def __init__(self, value: Any) -> None:
        super().__init__("the module's forward pass was stopped")
        self.value = value


def _hooks(
    blocks: StagedBlocks, run_stages: Callable[[Scan], jax.Array], *, runs_before: bool
) -> ScanHooks:
    """Return hooks that call `run_stages` in place of the scan over the blocks in stages.

    Args:
        blocks: division of the blocks.
        run_stages: returns the hidden state after the blocks in stages.
        runs_before: whether scans in front of the stages run; else they draw their dropout keys.
    """

    def run_blocks(scan: Scan) -> jax.Array:
        if scan.stack == blocks.stack:
            return run_stages(scan)
        if scan.stack in blocks.before and not runs_before:
            scan.keys()
            assert scan.hidden is not None
            return scan.hidden
        return scan.run()

    return ScanHooks(run_blocks=run_blocks)


def run_until_stages(
    opened: OpenedModel,
    blocks: StagedBlocks,
    arrays: Arrays,
    tokens: jax.Array,
    key: jax.Array | None,
    get_value: Callable[[Scan], Any],
    *,
    runs_before: bool = True,
) -> Any:
    """Call the module up to its stages, and return `get_value` of the scan that they divide."""

    def stop_at_stages(scan: Scan) -> jax.Array:
        raise _StopForward(get_value(scan))

    hooks = _hooks(blocks, stop_at_stages, runs_before=runs_before)
    try:
        opened.run(all_weights(opened, arrays), tokens, key, hooks)
    except _StopForward as stop:
        return stop.value
    raise AssertionError("the module returned before its stages")


def run_after_stages(
    opened: OpenedModel,
    blocks: StagedBlocks,
    arrays: Arrays,
    x: jax.Array,
    tokens: jax.Array,
    key: jax.Array | None = None,
) -> jax.Array:
    """Compute logits from x, the hidden state after the last stage."""
    with recording_later() as begin_recording:

        def run_stages(scan: Scan) -> jax.Array:
            begin_recording()
            return x

        hooks = _hooks(blocks, run_stages, runs_before=False)
        return opened.finish_logits(
            opened.run(all_weights(opened, arrays), tokens, key, hooks), tokens
        )


def all_weights(opened: OpenedModel, weights: Arrays) -> Arrays:
    """Return all weights in the dtype of the computation; those not in `weights` as shapes."""
    specs = opened.specs()
    shapes = {
        path: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype if "vocab" in spec.axes else opened.settings.dtype
        )
        for path, spec in specs.items()
    }
    return shapes | opened.cast_parameters(weights)
