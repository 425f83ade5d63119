"""Schedule-free AdamW: averaged weights in place of a decaying learning rate.

The parameters of a state are the averaged weights, which are evaluated, saved, exported and served
like those of any optimizer. Gradients are taken at another point, between them and the sequence z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.config.schema import Optimizer
from lowering.trees import Tree

Part = Callable[[Tree], Tree]


def gradient_point(optimizer: Optimizer, averaged: Tree, z: Tree) -> Tree:
    """Return the weights at which the gradient is taken."""
    beta = optimizer.beta1
    return jax.tree.map(lambda x, at: beta * x + (1 - beta) * at, averaged, z)


def schedule_free(optimizer: Optimizer, decays: Tree) -> optax.GradientTransformationExtraArgs:
    """Build schedule-free AdamW; its updates move the averaged weights.

    Args:
        optimizer: Settings.
        decays: Whether each parameter decays.

    Source: Defazio et al. 2024, https://arxiv.org/abs/2405.15682, algorithm 1
    """
    beta2, epsilon, decay = optimizer.beta2, optimizer.epsilon, optimizer.weight_decay

    def init(params: Any) -> Any:  # optax's names
        return {
            "count": jnp.zeros((), jnp.int32),
            "weight_sum": jnp.zeros(()),
            "max_rate": jnp.zeros(()),
            "z": jax.tree.map(jnp.copy, params),
            "nu": jax.tree.map(jnp.zeros_like, params),
        }

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
        learning_rate, count = given["learning_rate"], state["count"] + 1
        max_rate = jnp.maximum(state["max_rate"], learning_rate)
        weight = jnp.square(max_rate)  # steps of the warm-up count less
        weight_sum = state["weight_sum"] + weight
        share = jnp.where(weight_sum > 0, weight / jnp.maximum(weight_sum, 1e-38), 0.0)
        nu = jax.tree.map(
            lambda old, g: beta2 * old + (1 - beta2) * jnp.square(g), state["nu"], updates
        )
        correction = 1 - beta2 ** count.astype(jnp.float32)
        at = gradient_point(optimizer, params, state["z"])

        def step(z: jax.Array, g: jax.Array, v: jax.Array, y: jax.Array, decayed: bool):
            direction = g / (jnp.sqrt(v / correction) + epsilon)
            return z - learning_rate * (direction + decay * y if decayed else direction)

        z = jax.tree.map(step, state["z"], updates, nu, at, decays)
        moved = jax.tree.map(lambda x, new: share * (new - x), params, z)
        return moved, {
            "count": count,
            "weight_sum": weight_sum,
            "max_rate": max_rate,
            "z": z,
            "nu": nu,
        }

    return optax.GradientTransformationExtraArgs(init, update)
