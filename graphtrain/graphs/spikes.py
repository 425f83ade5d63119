"""Steps that are left undone if their loss or gradient norm is above a limit.

The limits are inputs of the step, so that changing them compiles nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.loss_scale import STATE as LOSS_SCALE
from graphtrain.graphs.names import SPIKE
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

LIMITS = "limits"  # name of the input
_SCALAR = ArraySpec((), (), "float32", "activation")


def limit_specs(program: ResolvedProgram) -> dict[str, Tree]:
    """Return the input of limits of a training step; none if it cannot be left undone."""
    if not program.optimizer.skip_spikes:
        return {}
    return {LIMITS: {"loss": _SCALAR, "grad_norm": _SCALAR}}


def spike_metrics(program: ResolvedProgram) -> tuple[str, ...]:
    """Return the names of the metrics of a step that concern spikes."""
    return (SPIKE,) if program.optimizer.skip_spikes else ()


def unless_spike(before: Tree, outputs: Tree, limits: Tree | None) -> Tree:
    """Return the outputs of a step; if it is above a limit, with the old state, bit for bit.

    Only the number of the step, the metrics and, after an overflow, the loss scale then change.

    Args:
        before: Training state before the step, as it is sharded in the step.
        outputs: State and metrics after it.
        limits: Largest loss and gradient norm of a step that counts; None: it always does.
    """
    if limits is None:
        return outputs
    state, metrics = outputs["state"], outputs["metrics"]
    loss, norm = metrics["loss"], metrics["grad_norm"]
    counts = (
        jnp.isfinite(loss)
        & jnp.isfinite(norm)
        & (loss <= limits["loss"])
        & (norm <= limits["grad_norm"])
    )
    kept = {
        name: _select(counts, state[name], before[name]) for name in ("parameters", "optimizer")
    }
    if LOSS_SCALE in state:  # which an overflow lowers
        is_new = counts | ~jnp.isfinite(norm)
        kept[LOSS_SCALE] = _select(is_new, state[LOSS_SCALE], before[LOSS_SCALE])
    return {
        "state": {**state, **kept},
        "metrics": {**metrics, SPIKE: jnp.where(counts, 0.0, 1.0)},
    }


def _select(condition: jax.Array, new: Any, old: Any) -> Any:
    """Return one of two trees. A select, not a branch: not every target has programs with those."""
    return jax.tree.map(partial(jnp.where, condition), new, old)
