"""Biases by which routers balance their experts: updated from the load, not by gradients.

A bias has the role "buffer" among the parameters, and its gradient is the number of choices of each
expert (`models.routing`). The optimizer sees zeros in its place.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowering.trees import Tree


def without_loads(gradients: Tree, specs: Tree) -> Tree:
    """Return the gradients with zeros in place of the loads of experts.

    Args:
        gradients: Gradients of the parameters.
        specs: ArraySpecs of the parameters.
    """
    return jax.tree.map(
        lambda gradient, spec: jnp.zeros_like(gradient) if spec.role == "buffer" else gradient,
        gradients,
        specs,
    )


def update_expert_biases(specs: Tree, rate: float) -> optax.GradientTransformationExtraArgs:
    """Build the update of biases: up for experts below the mean load, down for those above it.

    `loads`, an argument of `update`, are the gradients of the parameters before without_loads.

    Args:
        specs: ArraySpecs of the parameters.
        rate: Size of the update.

    Source: Wang et al. 2024, "Auxiliary-loss-free load balancing", algorithm 1,
    https://arxiv.org/abs/2408.15664
    """

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
        def updated(update: jax.Array, load: jax.Array, spec: Any) -> jax.Array:
            if spec.role != "buffer":
                return update
            return rate * jnp.sign(load.mean(-1, keepdims=True) - load)

        return jax.tree.map(updated, updates, given["loads"], specs), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
