"""Pipeline parallelism: microbatches through stages on different devices, in one program.

The module is independent of the model: the caller passes a function before the stages (embedding),
a stage, and a function after them (LM head and loss). The last two run inside one shard_map over
the mesh axis of the stages and those along which weights are only replicated: data, and with ring
attention context. The tensor, fsdp and expert axes stay automatic, so the model's own sharding
constraints apply to them, as they do to context with Ulysses' all-to-all.
This form was chosen over a vmap over stages because

- a stage is an ordinary call of the model, so its own shard_map can be nested, and the shift to the
  next stage is exactly one collective-permute;
- weight gradients are accumulated on each device until the loop ends, so the all-reduce over data
  and context happens once a step. The compiler would otherwise insert it at every tick, in every
  layer. (The automatic fsdp axis gathers weights and scatters gradients at every tick, as it does
  for each microbatch of gradient accumulation.)

Of M microbatches, stage s of S stores a block, embeds it and computes its loss: indices s M/S to
(s + 1) M/S - 1, so no work is repeated. A queue moves microbatches to the first stage and results
back: with every new microbatch, one column of it moves by one stage around the ring.
sharding_rules.pipeline defines the number of ticks and the work in each.

The embedding is outside the shard_map: it is in no loop, and XLA's partitioner crashes on a lookup
in a sharded table inside a shard_map over other axes (jax 0.11.2).

check_vma is off: with it, a model would have to mark every constant that a loop carries. The
gradient of an input is then summed over the manual axes absent from its spec, as weights require.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lowering.pipeline.part_gradients import InPlace
from lowering.pipeline.recorded import Wanted
from lowering.pipeline.ring import Ring, read_slot
from lowering.tracing.constrain import mesh_axes_of, placement
from lowering.tracing.recording import Recorded, call_recording, zero_slots
from lowering.trees import Tree
from sharding_rules.pipeline import Schedule, WeightCopies, weight_copies


class ManualAxes(NamedTuple):
    """Mesh axes that are manual in a pipeline's loop."""

    ring: Ring  # of the stages
    copies: WeightCopies = WeightCopies()

    @property
    def all(self) -> tuple[str, ...]:
        return (self.ring.axis, *self.copies.all)


Scalars = Any  # a pytree of scalars
StageResult = tuple[jax.Array, Scalars, Scalars]  # x, terms of the objective, metrics


class PartWeights(NamedTuple):
    """Weights of one part of a pipeline: those that get gradients, and those that are frozen."""

    trained: Tree
    frozen: Tree = None  # of any dtype


class PipelineLoss(NamedTuple):
    """Objective and metrics, summed over all microbatches."""

    objective: jax.Array  # loss to minimise, including the auxiliary terms of the stages
    metrics: tuple[Scalars, Scalars]  # of `last`, and of `stage`


@dataclass(frozen=True)
class Pipeline:
    """Functions of a pipeline, applied to each microbatch; all microbatches have the same shapes.

    Parameters are {"first", "stages", "last"}, each PartWeights. Arrays of "stages" have a leading
    axis of layer rows, equally many for each stage, or with several rounds two leading axes
    (rounds, rows).
    Arrays of the microbatches have shape (microbatches, sequences, positions, ...); the number of
    microbatches is a multiple of the number of stages.
    """

    # (parameters, microbatch, its index) -> x
    first: Callable[[PartWeights, Tree, jax.Array], jax.Array]
    # (parameters of a chunk, x, indices of microbatch and chunk) -> result, whose scalars are means
    # over the sequences
    stage: Callable[[PartWeights, jax.Array, jax.Array, jax.Array], StageResult]
    # (parameters, x, microbatch), or some positions of the last two -> (objective, metrics)
    last: Callable[[PartWeights, jax.Array, Tree], tuple[jax.Array, Scalars]]
    virtual_stages: int = 1  # chunks of layers for each stage (virtual stages)
    remat: bool = True  # activation checkpointing of each stage; always on with 1f1b
    mixes_sequences: bool = (
        False  # a stage computes across sequences, so the data axis stays automatic
    )
    # A stage computes a ring's part of the positions, given only that part of x.
    splits_positions: bool = False
    last_mixes_positions: bool = False  # `last` needs all positions of a sequence
    # Names of the arrays of a microbatch that every stage reads, with all positions, and the
    # context of these arrays in which a stage runs.
    read_by_stages: tuple[str, ...] = ()
    stage_context: Callable[[Tree], AbstractContextManager] = lambda arrays: nullcontext()
    # (parameters of `first`, microbatch) -> further arrays of the microbatch, for `last`. Not with
    # 1f1b.
    beside: Callable[[PartWeights, Tree], Tree] | None = None
    wanted: Wanted | None = None  # named activations that are returned; None: none
    # By part: arrays to whose sums `stage` and `last` add their gradients. They get SummedGradient.
    in_place: Mapping[str, InPlace] = field(default_factory=dict)

    def recorded(
        self, part: Callable[..., Any], slots: Recorded, *inputs: Any
    ) -> tuple[Any, Recorded]:
        """Call a part of the pipeline; return its result and the activations that are wanted."""
        return call_recording(self.wanted and self.wanted.values, slots, part, *inputs)

    def slots(self, part: Callable[..., Any], *inputs: Any) -> Recorded:
        """Return zeros for the activations of a part whose gradients are wanted."""
        return {} if self.wanted is None else zero_slots(self.wanted.gradients, part, *inputs)

    def divide(self, microbatches: Tree) -> tuple[Tree, Tree]:
        """Divide arrays of the microbatches: those that stages divide, and those that all read."""
        if not self.read_by_stages:
            return microbatches, {}
        read = {name: microbatches[name] for name in self.read_by_stages}
        return {name: microbatches[name] for name in microbatches.keys() - read.keys()}, read

    def run_stage(
        self, rows: PartWeights, x: jax.Array, microbatch: jax.Array, chunk: jax.Array, arrays: Tree
    ) -> StageResult:
        """Call `stage` in its context.

        Args:
            rows: Parameters of a chunk.
            x: Its input.
            microbatch: Index of the microbatch.
            chunk: Index of the chunk.
            arrays: Those that stages read, of all microbatches.
        """
        with self.stage_context(jax.tree.map(lambda array: read_slot(array, microbatch), arrays)):
            return self.stage(rows, x, microbatch, chunk)

    def embed(
        self, ring: Ring, weights: PartWeights, microbatches: Tree, slots: Recorded
    ) -> tuple[jax.Array, Recorded]:
        """Return the embedded microbatches in blocks; each stage computes equally many."""
        indices = jnp.arange(len(jax.tree.leaves(microbatches)[0]))

        def embed_one(
            weights: PartWeights, slots: Recorded, *inputs: Any
        ) -> tuple[jax.Array, Recorded]:
            return self.recorded(self.first, slots, weights, *inputs)

        embed_all = jax.vmap(embed_one, in_axes=(None, 0, 0, 0), spmd_axis_name=ring.axis)
        return embed_all(weights, slots, microbatches, indices)

    def with_arrays_beside(self, ring: Ring, weights: PartWeights, microbatches: Tree) -> Tree:
        """Return the microbatches with the arrays that `beside` computes of them."""
        if self.beside is None:
            return microbatches
        each = jax.vmap(self.beside, in_axes=(None, 0), spmd_axis_name=ring.axis)
        return {**microbatches, **each(weights, microbatches)}

    def total(
        self,
        scores: tuple[jax.Array, Scalars],
        of_stages: tuple[Scalars, Scalars],
        copies: int,
    ) -> PipelineLoss:
        """Sum the losses of the microbatches, and the stages' terms and metrics of all ticks."""
        objective, reported = jax.tree.map(lambda array: array.sum(0), scores)
        terms, stage_metrics = of_stages
        return PipelineLoss(
            objective + sum(map(jnp.sum, jax.tree.leaves(terms))) / copies,
            (reported, jax.tree.map(lambda array: array.sum(0) / copies, stage_metrics)),
        )

    def axes(self, schedule: Schedule, microbatches: Tree) -> ManualAxes:
        """Return the mesh axes of the loop's shard_map."""
        current = placement()
        assert current is not None, "a pipeline outside placed"
        (stage,) = mesh_axes_of("stages")
        ring = Ring(stage, current.shape.axes[stage])
        if self.mixes_sequences:
            return ManualAxes(ring)
        length = jax.tree.leaves(microbatches)[0].shape[2]
        copies = weight_copies(current.rules, current.shape, schedule, length)
        return ManualAxes(ring, copies if self.splits_positions else copies._replace(positions=()))

    def parameter_specs(self, ring: Ring) -> Tree:
        """Return how the parameters of the loop are split over the mesh axis of the stages."""
        rows = (
            PartitionSpec(ring.axis) if self.virtual_stages == 1 else PartitionSpec(None, ring.axis)
        )
        return {"stages": rows, "last": PartitionSpec()}


def loop_parameters(parameters: Tree) -> Tree:
    """Return the parameters that the loop over ticks uses: all but those of `first`."""
    return {group: parameters[group] for group in ("stages", "last")}


def map_stages(body: Callable, manual: tuple[str, ...], inputs: Any, outputs: Any) -> Callable:
    """Return `body` as a shard_map over the manual mesh axes; the others stay automatic."""
    current = placement()
    assert current is not None
    return jax.shard_map(
        body,
        mesh=current.current_mesh,
        in_specs=inputs,
        out_specs=outputs,
        axis_names=set(manual),
        check_vma=False,
    )


def mesh_axes_size(axes: tuple[str, ...]) -> int:
    """Return the number of devices along these mesh axes."""
    current = placement()
    assert current is not None
    return math.prod(current.shape.axes[name] for name in axes)


def scalars_as_arrays(value: PipelineLoss) -> PipelineLoss:
    """Return each device's scalars as arrays of size 1, to be summed outside the shard_map."""
    return jax.tree.map(lambda scalar: scalar[None], value)
