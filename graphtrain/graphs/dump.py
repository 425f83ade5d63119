"""Dump of a training step: activations, their gradients, and gradients of parameters as outputs.

Names of arrays begin with their kind. "forward/layers/3/mlp/up" is an activation, "backward/..."
the gradient of the objective with respect to it, "gradients/layers/3/mlp/up" that of a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.errors import PlanError
from graphtrain.graphs.array_summary import summarize
from graphtrain.graphs.dumped_arrays import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    NamedArray,
    all_arrays,
    choose,
)
from graphtrain.graphs.loss_scale import loss_scale, unscaled
from graphtrain.graphs.names import KINDS, SUMMARY
from graphtrain.graphs.objectives import metric_names, step_key, training_objective
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.pipelined_dump import layers_of_rows, recorded_gradients
from graphtrain.graphs.targets_ahead import with_targets_ahead
from graphtrain.graphs.weight_specs import frozen_specs, trained_specs
from graphtrain.models.attention.ring_order import to_ring_order
from lowering.tracing.constrain import constrain, constrain_tree
from lowering.tracing.current_target import trace_for_target
from lowering.tracing.recorded_lines import RecordedLines, recorded_lines
from lowering.tracing.recording import RecordedArray, recording
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.pipeline import Stages


@dataclass(frozen=True)
class ArrayDump:
    """Arrays that a dump of a program returns beside the results of its training step."""

    program: ResolvedProgram
    specs: Tree  # ArraySpecs of the parameters
    recorded: Mapping[str, RecordedArray]  # activations, in the order of execution
    chosen: tuple[NamedArray, ...]  # in the order of execution

    @classmethod
    def of(cls, program: ResolvedProgram, inputs: Mapping[str, Tree]) -> ArrayDump:
        """Find the arrays that program.dump names; traces the objective once.

        Args:
            program: the program.
            inputs: ArraySpecs of the inputs of its training step.

        Raises:
            PlanError: no array has such a name.
        """
        specs = inputs["state"]["parameters"]
        if program.stages is not None:
            # Of the layers in order, as dumps of other meshes have them.
            _check_alike(program)
            specs = trained_specs(replace(program, stages=None))
        recorded, lines = _recorded(program, inputs, specs)
        arrays = all_arrays(specs, recorded, lines)
        chosen = choose(program.settings.dump.arrays, arrays)
        return cls(program, specs, recorded, tuple(chosen))

    @property
    def outputs(self) -> Tree:
        """ArraySpecs of the arrays, by kind and path."""
        return unflatten(
            {output: self._spec(output, layers) for output, layers in self._rows().items()}
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the record of the program, by which outputs are read: one entry by array."""
        rows, microbatches = self._rows(), self.program.batch.microbatches
        return {
            "summary": self.program.settings.dump.summary,
            "arrays": [
                {
                    "name": one.name,
                    "output": (output := f"{one.kind}/{one.path}"),
                    "row": None if one.layer is None else rows[output].index(one.layer),
                    "axes": list(self._axes(one)),
                    "shape": self._shape(one, microbatches),
                    "dtype": self._dtype(one.kind, one.path),
                    "lines": list(one.lines),
                }
                for one in self.chosen
            ],
        }

    def gradients(self, state: Tree, batch: Tree, frozen: Tree | None) -> tuple[Tree, Tree, Tree]:
        """Return gradients and metrics as `accumulate_gradients`, and the arrays of the dump.

        Gradients are reduced after each microbatch.
        """
        batch = to_ring_order(with_targets_ahead(self.program, batch))
        scale = loss_scale(self.program, state)
        if self.program.stages is not None:
            gradients, metrics, arrays = self._pipelined(self.program.stages, state, frozen, batch)
        else:
            gradients, metrics, arrays = self._accumulated(state, batch, frozen)
        gradients = unscaled(gradients, scale)
        arrays |= self._returned({GRADIENTS: self._of_parameters(gradients)})
        return gradients, metrics, unflatten(arrays)

    def _pipelined(
        self, stages: Stages, state: Tree, frozen: Tree | None, batch: Tree
    ) -> tuple[Tree, Tree, dict[str, jax.Array]]:
        """Return gradients, times the loss scale, metrics and arrays of activations."""
        program, key = self.program, step_key(self.program, state)
        gradients, metrics, forward, backward = recorded_gradients(
            program,
            stages,
            state,
            frozen,
            batch,
            key,
            self.recorded,
            self._paths(FORWARD),
            self._paths(BACKWARD),
        )
        arrays = {FORWARD: forward, BACKWARD: self._unscaled(backward, loss_scale(program, state))}
        specs = open_language_model(program.model).pipeline_specs(self.specs, stages)
        gradients = constrain_tree(gradients, specs, "optimizer")
        return gradients, metrics, jax.vmap(self._returned)(arrays)

    def _of_parameters(self, gradients: Tree) -> dict[str, jax.Array]:
        """Return the gradients of parameters by path, their layers in order."""
        stages, by_path = self.program.stages, flatten(gradients)
        if stages is None:
            return by_path
        shapes = {path: spec.shape for path, spec in flatten(self.specs).items()}
        return {
            path: array if array.shape == shapes[path] else layers_of_rows(stages, array)
            for path, array in by_path.items()
        }

    def _unscaled(
        self, backward: Mapping[str, jax.Array], scale: jax.Array | None
    ) -> Mapping[str, jax.Array]:
        """Return gradients of activations without the loss scale."""
        if scale is None:
            return backward
        # In float32, since without the scale some would round to zero.
        return {path: x.astype(jnp.float32) / scale for path, x in backward.items()}

    def _accumulated(
        self, state: Tree, batch: Tree, frozen: Tree | None
    ) -> tuple[Tree, Tree, dict[str, jax.Array]]:
        """Return gradients, times the loss scale, metrics and arrays of activations."""
        microbatches, scale = self.program.batch.microbatches, loss_scale(self.program, state)
        parameters = state["parameters"]
        objective = training_objective(self.program, state, frozen, batch)
        wanted = {kind: self._paths(kind) for kind in KINDS}

        def recorded_objective(
            parameters: Tree, slots: Mapping[str, jax.Array], microbatch: Tree, index: Any
        ) -> tuple[jax.Array, tuple[Tree, Mapping[str, jax.Array]]]:
            with recording(lambda path: path in wanted[FORWARD], slots) as recorder:
                value, metrics = objective(parameters, microbatch, index)
            return value, (metrics, recorder.values)

        def microbatch_gradients(microbatch: Tree, index: Any) -> tuple[Any, Tree]:
            differentiate = jax.value_and_grad(recorded_objective, argnums=(0, 1), has_aux=True)
            slots = {path: self._slot(path) for path in wanted[BACKWARD]}
            (_, (metrics, forward)), (gradients, backward) = differentiate(
                parameters, slots, microbatch, index
            )
            gradients = constrain_tree(gradients, self.specs, "optimizer")
            arrays = {FORWARD: forward, BACKWARD: self._unscaled(backward, scale)}
            return (gradients, metrics), self._returned(arrays)

        if microbatches == 1:
            first = jax.tree.map(lambda array: array[0], batch)
            (gradients, metrics), arrays = microbatch_gradients(first, 0)
        else:

            def add(sums: Any, indexed: tuple[Tree, jax.Array]) -> tuple[Any, Tree]:
                new, arrays = microbatch_gradients(*indexed)
                return jax.tree.map(jnp.add, sums, new), arrays

            zeros = constrain_tree(
                jax.tree.map(jnp.zeros_like, parameters), self.specs, "optimizer"
            )
            start = zeros, {name: jnp.zeros(()) for name in metric_names(self.program)}
            (gradients, metrics), arrays = jax.lax.scan(
                add, start, (batch, jnp.arange(microbatches))
            )
        return gradients, metrics, arrays

    def _returned(self, arrays: Mapping[str, Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
        """Return the chosen arrays of these kinds, or their summaries, by kind and path."""
        returned = {}
        for output, layers in self._rows().items():
            kind, path = output.split("/", 1)
            if kind not in arrays:
                continue
            x = arrays[kind][path]
            if layers and len(layers) < x.shape[0]:
                x = x[jnp.array(layers)]
            is_summary = self.program.settings.dump.summary
            returned[output] = summarize(x, 1 if layers else 0) if is_summary else x
        return returned

    def _rows(self) -> dict[str, list[int]]:
        """Return the chosen layers by kind and path; empty for an array that stacks none."""
        rows: dict[str, list[int]] = {}
        for one in self.chosen:
            layers = rows.setdefault(f"{one.kind}/{one.path}", [])
            if one.layer is not None:
                layers.append(one.layer)
        return {output: sorted(layers) for output, layers in rows.items()}

    def _paths(self, kind: str) -> list[str]:
        return list(dict.fromkeys(one.path for one in self.chosen if one.kind == kind))

    def _slot(self, path: str) -> jax.Array:
        one = self.recorded[path]
        return constrain(jnp.zeros(one.shape, one.dtype), *one.axes)

    def _array(self, kind: str, path: str) -> ArraySpec | RecordedArray:
        return flatten(self.specs)[path] if kind == GRADIENTS else self.recorded[path]

    def _dtype(self, kind: str, path: str) -> str:
        precision, dtype = self.program.settings.precision, self.program.model.dtype
        is_unscaled = kind == BACKWARD and precision.scaling(dtype) is not None
        return "float32" if is_unscaled else self._array(kind, path).dtype

    def _axes(self, one: NamedArray) -> tuple[str | None, ...]:
        """Return the array axes of one layer of an array."""
        return self._array(one.kind, one.path).axes[0 if one.layer is None else 1 :]

    def _shape(self, one: NamedArray, microbatches: int) -> list[int]:
        """Return the shape of one layer of an array, of all microbatches together."""
        shape = list(self._array(one.kind, one.path).shape[0 if one.layer is None else 1 :])
        if one.kind != GRADIENTS and self._axes(one)[:1] == ("batch",):
            shape[0] *= microbatches
        return shape

    def _spec(self, output: str, layers: list[int]) -> ArraySpec:
        """Return the ArraySpec of an output, named by kind and path."""
        kind, path = output.split("/", 1)
        spec = self._array(kind, path)
        role = "optimizer" if kind == GRADIENTS else "activation"
        shape, axes, dtype = spec.shape, spec.axes, self._dtype(kind, path)
        if layers:  # a part of them, which their mesh axes may not divide
            shape, axes = (len(layers), *shape[1:]), (None, *axes[1:])
        if self.program.settings.dump.summary:
            shape = (*shape[: 1 if layers else 0], len(SUMMARY))
            axes, dtype, role = (None,) * len(shape), "float32", "activation"
        microbatches = self.program.batch.microbatches
        if kind != GRADIENTS and microbatches > 1:
            shape, axes = (microbatches, *shape), (None, *axes)
        return ArraySpec(shape, axes, dtype, role)


def _check_alike(program: ResolvedProgram) -> None:
    """Refuse pipelines in which rows of stages are not all layers of the model.

    Raises:
        PlanError: layers repeat after a period, or some are outside of the stages.
    """
    if not open_language_model(program.model).has_like_layers:
        raise PlanError(
            "program.dump does not support pipeline stages of a model whose layers are not all "
            "alike; set program.mesh.stage = 1"
        )


def _recorded(
    program: ResolvedProgram, inputs: Mapping[str, Tree], specs: Tree
) -> tuple[dict[str, RecordedArray], RecordedLines]:
    """Return the activations that a model names, in the order of execution, and their lines.

    They are those of one microbatch without stages, whose layers are in order.
    """
    program = replace(program, stages=None)
    state = {**inputs["state"], "parameters": specs}
    inputs = {**inputs, "state": state, "frozen": frozen_specs(program)}

    def trace(state: Tree, frozen: Tree | None, batch: Tree, microbatch: Tree) -> jax.Array:
        objective = training_objective(program, state, frozen, batch)
        return objective(state["parameters"], microbatch, 0)[0]

    shapes = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        {name: inputs[name] for name in ("state", "frozen", "batch")},
    )
    inputs_of_trace = [shapes[name] for name in ("state", "frozen", "batch")]
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes["batch"])
    with trace_for_target(program.target), recording(marks=True) as recorder:
        traced = jax.make_jaxpr(trace)(*inputs_of_trace, microbatch)
    return recorder.described, recorded_lines(traced)
