"""Adam in the eigenbasis of two-sided preconditioners, for a stack of whole matrices (SOAP)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Optimizer
from lowering.tracing.control_flow import stated_frequency

Arrays = dict[str, jax.Array]

# Sides of a matrix: the equations with which it is multiplied by a basis, and by its transpose, and
# of the product of gradients that is averaged.
_TO_BASIS = {"left": "kri,krc->kic", "right": "krc,kci->kri"}
_FROM_BASIS = {"left": "kri,kic->krc", "right": "kri,kci->krc"}
_SQUARES = {"left": "krc,ksc->krs", "right": "krc,krd->kcd"}


def update_matrices(
    count: jax.Array, whole: Arrays, row_dimensions: int, optimizer: Optimizer
) -> Arrays:
    """Return the directions, as "gradient", and the new state of a stack of matrices.

    Args:
        count: Steps so far. At the first one the preconditioners begin, and the direction is zero.
        whole: "gradient", "mu" (already averaged) and "nu" of (stack, rows..., columns...), with
            "left", "left_basis", "right" and "right_basis" of the sides that have them.
        row_dimensions: Number of dimensions that are rows.
        optimizer: Settings.

    Source: Vyas et al. 2024, https://arxiv.org/abs/2409.11321, algorithms 3 and 4
    """
    shape = whole["gradient"].shape
    rows = math.prod(shape[1 : 1 + row_dimensions])
    flat = {part: whole[part].reshape(shape[0], rows, -1) for part in ("gradient", "mu", "nu")}
    bases = {side: whole[f"{side}_basis"] for side in ("left", "right") if side in whole}
    is_first = count == 0
    gradient, moment = (_turn(_TO_BASIS, flat[part], bases) for part in ("gradient", "mu"))
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    averaged = beta2 * flat["nu"] + (1 - beta2) * jnp.square(gradient)
    nu = jnp.where(is_first, flat["nu"], averaged)
    steps = jnp.maximum(count, 1).astype(jnp.float32)
    correction = jnp.sqrt(1 - beta2**steps) / (1 - beta1**steps)
    adam = moment / (jnp.sqrt(nu) + optimizer.epsilon) * correction
    direction = jnp.where(is_first, 0.0, _turn(_FROM_BASIS, adam, bases))

    squares = {
        side: beta2 * whole[side]
        + (1 - beta2) * _multiply(_SQUARES[side], flat["gradient"], flat["gradient"])
        for side in bases
    }
    bases, nu = _next_bases(count, squares, bases, nu, optimizer)
    named = {f"{side}_basis": basis for side, basis in bases.items()}
    return squares | named | {"gradient": direction.reshape(shape), "nu": nu.reshape(shape)}


def _multiply(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)


def _turn(
    equations: Mapping[str, str], matrices: jax.Array, bases: Mapping[str, jax.Array]
) -> jax.Array:
    """Return matrices in their eigenbases, or out of them; a side without one stays."""
    for side, basis in bases.items():
        operands = (basis, matrices) if side == "left" else (matrices, basis)
        matrices = _multiply(equations[side], *operands)
    return matrices


def _next_bases(
    count: jax.Array, squares: Arrays, bases: Arrays, nu: jax.Array, optimizer: Optimizer
) -> tuple[Arrays, jax.Array]:
    """Return bases for the next step, and the second moment in their order of eigenvectors."""
    frequency = optimizer.precondition_frequency_or_default
    if not bases:
        return bases, nu

    def begin(_: Arrays, nu: jax.Array) -> tuple[Arrays, jax.Array]:
        # Eigenvalues ascend; the largest comes first, as after each iteration.
        found = {side: jnp.linalg.eigh(square)[1] for side, square in squares.items()}
        return {side: basis[:, :, ::-1] for side, basis in found.items()}, nu

    def iterate(bases: Arrays, nu: jax.Array) -> tuple[Arrays, jax.Array]:
        new = {}
        for side, basis in bases.items():
            new[side], order = _power_iteration(squares[side], basis)
            along = 1 if side == "left" else 2
            nu = jnp.take_along_axis(nu, jnp.expand_dims(order, 3 - along), along)
        return new, nu

    def keep(bases: Arrays, nu: jax.Array) -> tuple[Arrays, jax.Array]:
        return bases, nu

    is_due = count % frequency == 0
    branch = jnp.where(count == 0, 2, jnp.where(is_due, 1, 0))
    with stated_frequency(1, frequency):
        return jax.lax.switch(branch, (keep, iterate, begin), bases, nu)


def _power_iteration(square: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the basis after one iteration, and the order in which it took the eigenvectors."""
    product = _multiply("krs,ksi->kri", square, basis)
    eigenvalues = _multiply("kri,kri->ki", basis, product)
    order = jnp.argsort(-eigenvalues, axis=-1, stable=True)
    sorted_product = jnp.take_along_axis(product, order[:, None, :], 2)
    return jnp.linalg.qr(sorted_product)[0], order
