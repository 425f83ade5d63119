"""Sums of microbatches' gradients, into which stacked layers write in place.

A second stack of the layers' newest gradients never exists; see lowering.tracing.summed_gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.weight_specs import trained_specs
from graphtrain.models.in_place_gradients import adds_in_place
from graphtrain.models.shapes import STACKS, head_path
from lowering.tracing.constrain import constrain_tree
from lowering.tracing.summed_gradient import GradientStack, SummedGradient
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec, Role


def written_in_place(program: ResolvedProgram, specs: Tree) -> frozenset[str]:
    """Return the paths of parameters whose gradients layers write in place: stacked ones, in scans.

    Vectors are left out: they are small, and those of all layers are reduced at once.
    """
    if not adds_in_place(program):
        return frozenset()
    return frozenset(
        path
        for path, spec in flatten(specs).items()
        if path.split("/")[0] in STACKS and len(spec.shape) > 2
    )


def gradients_in_place(
    program: ResolvedProgram, *, has_chunks: bool
) -> dict[str, dict[str, ArraySpec]]:
    """Return the arrays of a pipeline's parts whose gradients are added in place, by path.

    They are the matrices of the stages' layers and, if the loss is computed in chunks, the LM head.

    Args:
        program: Settings.
        has_chunks: Whether the loss is computed in chunks.
    """
    if not adds_in_place(program):
        return {}
    specs = flatten(trained_specs(program))
    layers = {
        path: spec
        for path, spec in specs.items()
        if path.startswith("layers/") and len(spec.shape) - _leading_axes(spec) > 1
    }
    path = head_path(program.model)
    head = {path: specs[path]} if has_chunks and not program.model.unit_norm_head else {}
    return {"stages": layers, "last": head}


def _leading_axes(spec: ArraySpec) -> int:
    """Return the number of axes of layers in stages."""
    return sum(axis in ("virtual_stages", "layers") for axis in spec.axes)


@dataclass(frozen=True)
class GradientSums:
    """Specs, role and paths with which gradients of microbatches are summed."""

    specs: Tree  # ArraySpecs of the parameters
    role: Role  # by whose rules the sums are sharded: each gradient is reduced straight to these
    in_place: Collection[str]  # paths of `written_in_place`

    def first(
        self, objective: Callable[[Tree], tuple[jax.Array, Tree]], parameters: Tree
    ) -> tuple[Tree, Tree]:
        """Return the gradients and metrics of one microbatch.

        Args:
            objective: Objective of the microbatch and its metrics, as a function of the parameters.
            parameters: Arrays.
        """
        zeros = {
            path: jnp.zeros_like(array)
            for path, array in flatten(parameters).items()
            if path in self.in_place
        }
        gradients, metrics = self._gradients(objective, flatten(parameters), zeros, has_sums=False)
        return unflatten(gradients), metrics

    def add(
        self,
        objective: Callable[[Tree], tuple[jax.Array, Tree]],
        parameters: Tree,
        sums: tuple[Tree, Tree],
    ) -> tuple[Tree, Tree]:
        """Return sums of gradients and of metrics, with those of one more microbatch.

        Args:
            objective: As of `first`.
            parameters: Arrays.
            sums: Gradients and metrics of earlier microbatches.
        """
        earlier = flatten(sums[0])
        gradients, metrics = self._gradients(objective, flatten(parameters), earlier, has_sums=True)
        added = {
            path: gradient if path in self.in_place else earlier[path] + gradient
            for path, gradient in gradients.items()
        }
        return unflatten(added), jax.tree.map(jnp.add, sums[1], metrics)

    def _gradients(
        self,
        objective: Callable[[Tree], tuple[jax.Array, Tree]],
        parameters: dict[str, jax.Array],
        sums: dict[str, jax.Array],
        *,
        has_sums: bool,
    ) -> tuple[dict[str, jax.Array], Tree]:
        """Return gradients by path, those in place added to `sums`; and metrics."""
        specs = flatten(self.specs)

        def objective_of(inputs: dict[str, jax.Array]) -> tuple[jax.Array, Tree]:
            stacked = {
                path: SummedGradient(
                    parameters[path],
                    inputs[path],
                    None,
                    GradientStack(specs[path], self.role, has_sums),
                )
                for path in self.in_place
            }
            return objective(unflatten(inputs | stacked))

        inputs = parameters | {path: sums[path] for path in self.in_place}
        differentiate = jax.value_and_grad(objective_of, has_aux=True)
        (_, metrics), gradients = differentiate(inputs)
        return flatten(constrain_tree(unflatten(gradients), self.specs, self.role)), metrics
