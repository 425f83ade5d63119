"""Loss scale of float16: a larger loss, whose gradients do not round to zero, and skipped steps.

A dynamic scale is part of the training state. A step whose gradients overflow changes the scale
alone; steps without overflow let it grow.

Source: Micikevicius et al. 2017, section 3.2, https://arxiv.org/abs/1710.03740; the rule is that
of torch.amp.GradScaler.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import LossScaling
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

STATE = "loss_scale"  # the state's part: scale, good_steps, skipped_steps
_METRICS = ("loss_scale", "skipped_steps")


def dynamic_scaling(program: ResolvedProgram) -> LossScaling | None:
    """Return the settings of a dynamic loss scale; None if it is constant, or there is none."""
    scaling = program.settings.precision.scaling(program.model.dtype)
    return scaling if isinstance(scaling, LossScaling) else None


def scale_specs(program: ResolvedProgram) -> dict[str, Tree]:
    """Return the ArraySpecs of the loss scale in the training state; none if it is not dynamic."""
    if dynamic_scaling(program) is None:
        return {}
    dtypes = {"scale": "float32", "good_steps": "int32", "skipped_steps": "int32"}
    return {STATE: {name: ArraySpec((), (), dtype, "optimizer") for name, dtype in dtypes.items()}}


def initial_scale(program: ResolvedProgram) -> dict[str, Tree]:
    """Return the loss scale of the first step, as a part of the training state."""
    if (scaling := dynamic_scaling(program)) is None:
        return {}
    zero = jnp.zeros((), jnp.int32)
    scale = jnp.full((), scaling.initial, jnp.float32)
    return {STATE: {"scale": scale, "good_steps": zero, "skipped_steps": zero}}


def loss_scale(program: ResolvedProgram, state: Tree) -> jax.Array | None:
    """Return the factor of the objective; None if it has none."""
    scaling = program.settings.precision.scaling(program.model.dtype)
    if isinstance(scaling, LossScaling):
        return state[STATE]["scale"]
    return None if scaling is None else jnp.full((), scaling, jnp.float32)


def scaled(value: Any, scale: jax.Array | None) -> Any:
    """Return a term of the objective times the scale."""
    return value if scale is None else value * scale


def unscaled(tree: Tree, scale: jax.Array | None) -> Tree:
    """Return gradients or metrics without the scale."""
    if scale is None:
        return tree
    inverse = 1 / scale
    return jax.tree.map(lambda array: array * inverse, tree)


def scale_metrics(program: ResolvedProgram) -> tuple[str, ...]:
    """Return the names of the metrics of a step that concern the loss scale."""
    return () if dynamic_scaling(program) is None else _METRICS


def unless_overflow(program: ResolvedProgram, before: Tree, outputs: Tree) -> Tree:
    """Return the outputs of a step; if its gradients overflowed, with the old state, bit for bit.

    Only the scale, the number of the step and the metrics then change. Without a dynamic scale
    the outputs stay as they are.

    Args:
        program: Settings.
        before: Training state before the step, as it is sharded in the step.
        outputs: State and metrics after it.
    """
    if (scaling := dynamic_scaling(program)) is None:
        return outputs
    state, metrics = outputs["state"], outputs["metrics"]
    is_finite = jnp.isfinite(metrics["grad_norm"])
    part = _next_scale(scaling, before[STATE], is_finite)
    values = before[STATE]["scale"], part["skipped_steps"].astype(jnp.float32)
    kept = {
        # A select, not a branch: not every target has programs with branches.
        name: jax.tree.map(partial(jnp.where, is_finite), state[name], before[name])
        for name in ("parameters", "optimizer")
    }
    return {
        "state": {**state, **kept, STATE: part},
        "metrics": {**metrics, **dict(zip(_METRICS, values, strict=True))},
    }


def _next_scale(scaling: LossScaling, part: Tree, is_finite: jax.Array) -> Tree:
    """Return the state's part after a step.

    Args:
        scaling: Settings.
        part: The part before the step.
        is_finite: Whether all gradients of the step are finite.
    """
    scale, good_steps = part["scale"], part["good_steps"] + 1
    grown = scale * scaling.growth_factor
    is_due = good_steps == scaling.growth_interval
    grown = jnp.where(is_due & jnp.isfinite(grown), grown, scale)
    return {
        "scale": jnp.where(is_finite, grown, scale * scaling.backoff_factor),
        "good_steps": jnp.where(is_finite & ~is_due, good_steps, 0),
        "skipped_steps": part["skipped_steps"] + jnp.where(is_finite, 0, 1),
    }
