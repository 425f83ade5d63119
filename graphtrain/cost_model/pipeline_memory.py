"""Memory of pipeline stages, by arithmetic.

The arrays that exist at once were read from programs compiled for h100:8, of a 0.2B in 4 stages and
of a 0.3B in 2 stages with fsdp 4, by all schedules, with and without chunks of logits; with 1F1B
also of a mixture and of a tied embedding, with data 2 in 4 stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.cool_down import sums_beside_ticks
from graphtrain.cost_model.head_memory import head_of, summed_head
from graphtrain.cost_model.layer_memory import current_layer, partial_sums
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import ShardedWeight
from graphtrain.models.flops import is_gated
from graphtrain.models.in_place_gradients import adds_in_place
from graphtrain.models.lora.trainable import is_quantized
from sharding_rules.pipeline import stored_stage_inputs

# Arrays of the shape of a microbatch's residual stream: in the backward pass of a layer, and those
# that a tick exchanges.
_STREAMS_OF_LAYER = 4
_STREAMS_OF_TICK = {"1f1b": 2, "gpipe": 1, "circular": 1}
# With the loss: 1F1B spreads the results over the stages. XLA gathers them over fsdp for that.
_STREAMS_OF_LOSS = 3


def stage_peak(
    program: ResolvedProgram,
    weights: Sequence[ShardedWeight],
    sizes: DeviceSizes,
    in_front: float,
    in_ticks: float,
) -> tuple[float, float, float]:
    """Return the bytes of gradients, saved activations and temporaries at a GPU's peak.

    The peak is in a layer's backward pass, with the loss, or at the end, when the embedding has its
    gradient too.

    Args:
        program: The program.
        weights: Result of shard_weights.
        sizes: Sizes of arrays on a device.
        in_front: Bytes of activations that layers in front of the stages save.
        in_ticks: Bytes of activations that the stage saves in its ticks.
    """
    gradients = _StageGradients.of(program, weights)
    phases = (
        (gradients.in_ticks, in_ticks, _at_layer(program, weights, sizes, in_ticks)),
        _at_loss(program, weights, sizes, gradients, in_ticks),
        (gradients.all, 0.0, 0.0),
    )
    of_gradients, saved, temporaries = max(phases, key=sum)
    return of_gradients, in_front + saved, temporaries


@dataclass(frozen=True)
class _StageGradients:
    """Bytes of float32 gradients, as the weights are stored."""

    layers: float
    newest: float  # of a chunk, where they are not added in place
    head: float
    embedding: float  # zeros for that of a tied embedding, which XLA writes before the loop of 1F1B
    all: float  # at the end

    @property
    def in_ticks(self) -> float:
        return self.layers + self.newest + self.at_loss

    @property
    def at_loss(self) -> float:
        """Bytes with the loss, without those of layers."""
        return self.head + self.embedding

    @classmethod
    def of(cls, program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> _StageGradients:
        trained = [weight for weight in weights if not weight.frozen]
        mesh, head = program.mesh, head_of(weights)
        layers = 4 * sum(each.elements("parameter", mesh) for each in trained if each.in_layers)
        is_one_forward = program.pipeline.schedule == "1f1b"
        in_place = is_one_forward and adds_in_place(program)
        of_head = 0.0 if head.frozen else 4 * head.elements("parameter", mesh)
        tied = of_head if program.model.tie_word_embeddings else 0.0
        embedding = tied if is_one_forward else 0.0
        return cls(
            layers=layers,
            newest=0.0 if in_place else layers / program.pipeline.virtual_stages,
            head=of_head,
            embedding=embedding,
            # Of a tied embedding, both parts' gradients and, in 1F1B, the zeros.
            all=4 * sum(each.elements("parameter", mesh) for each in trained) + tied + embedding,
        )


def _at_layer(
    program: ResolvedProgram,
    weights: Sequence[ShardedWeight],
    sizes: DeviceSizes,
    in_ticks: float,
) -> float:
    """Return the bytes of temporaries in the backward pass of a layer."""
    # Queries, keys and values repeated for all query heads, and attention's output.
    heads = 4 * sizes.sequences * sizes.seq_in_block * sizes.heads * sizes.head_dim
    queue = program.batch.microbatches / program.mesh.axes["stage"]
    passed_on = _STREAMS_OF_TICK[program.pipeline.schedule] + queue
    gathered = 2 * sum(each.used_of_a_layer(program.mesh) for each in weights if each.in_layers)
    return (
        _hidden_values(program, sizes)
        + partial_sums(program, sizes)
        + heads * sizes.item_bytes
        + _STREAMS_OF_LAYER * _stream(program, sizes)
        + passed_on * stage_input(program, sizes)
        + _zeros_before_loop(program, sizes, in_ticks)
        + (gathered if _has_fsdp(weights) else 0.0)
        + _transposed(program, weights)
        + _summed_rows(program, weights)
    )


def _summed_rows(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> float:
    """Return the bytes of the gradients that a tick of interleaved 1F1B sums over data."""
    sums, stages = sums_beside_ticks(program), program.stages
    assert stages is not None
    layers = (each for each in weights if each.in_layers and not each.frozen)
    gradients = 4 * sum(each.elements("parameter", program.mesh) for each in layers)
    return gradients * sums.rows_per_tick / (stages.rounds * stages.rows_per_chunk)


def _hidden_values(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of the current layer's hidden values, of the MLP or of experts."""
    if program.model.moe is not None or program.model.remat != "full":
        return current_layer(program, sizes, flash=True)
    inside = sizes.sequences * sizes.seq_in_block * sizes.item_bytes
    return inside * sizes.mlp * (6 if is_gated(program.model) else 3)


def _at_loss(
    program: ResolvedProgram,
    weights: Sequence[ShardedWeight],
    sizes: DeviceSizes,
    gradients: _StageGradients,
    in_ticks: float,
) -> tuple[float, float, float]:
    """Return the bytes of gradients, saved activations and temporaries while a loss is computed."""
    is_one_forward, rounds = program.pipeline.schedule == "1f1b", program.pipeline.virtual_stages
    stream, stages = stage_input(program, sizes), program.mesh.axes["stage"]
    head = head_of(weights)
    in_use = 2 * head.used_of_a_layer(program.mesh)
    unsharded = summed_head(weights, program.mesh) if sizes.in_chunks and _has_fsdp([head]) else 0.0
    queue = program.batch.microbatches / stages
    logits = logits_of_stage(program, sizes)
    streams = _STREAMS_OF_LOSS + queue
    if is_one_forward:
        gathered = program.mesh.axes.get("fsdp", 1) if _has_fsdp(weights) else 1
        temporaries = logits + in_use + unsharded + (streams + gathered) * stream
        temporaries += _zeros_before_loop(program, sizes, in_ticks) + _transposed(program, weights)
        return gradients.layers + gradients.at_loss, in_ticks, temporaries
    # XLA begins the sums of several chunks of layers before the loss.
    of_layers = gradients.layers if rounds > 1 else 0.0
    ticks = program.batch.microbatches * rounds + stages - 1
    is_recomputed = program.pipeline.recomputes_stages(program.model.remat)
    saved = ticks * stream if is_recomputed else in_ticks
    temporaries = logits + in_use + unsharded + (streams + queue) * stream
    return of_layers + gradients.at_loss, saved, temporaries + _transposed(program, weights)


def logits_of_stage(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of a pipeline's logits, and of their gradient in the model's dtype.

    1F1B shards them over the stages by position, of which chunks have a number of their own. DPO
    has those of the policy and of the reference model, which the gradient replaces.
    """
    positions = 4 * sizes.scored_positions + sizes.item_bytes * sizes.logit_positions
    if program.loss.kind == "dpo":
        positions = 2 * 4 * sizes.logit_positions
    is_divided = program.pipeline.schedule == "1f1b" and not sizes.in_chunks
    parts = program.mesh.axes["stage"] if is_divided else 1
    return positions * sizes.sequences * sizes.vocab / parts


def _zeros_before_loop(program: ResolvedProgram, sizes: DeviceSizes, in_ticks: float) -> float:
    """Return the bytes of zeros in which each tick of 1F1B saves the activations of a chunk.

    XLA writes them once, before the loop over ticks, where their sharding over an automatic mesh
    axis makes a copy. A mixture's data axis is automatic too, and makes none.
    """
    automatic = [axis for axis in program.mesh.axes if axis not in ("data", "stage", "context")]
    if program.pipeline.schedule != "1f1b" or program.mesh.size(tuple(automatic)) == 1:
        return 0.0
    return in_ticks - _stored_inputs(program) * stage_input(program, sizes)


def _stored_inputs(program: ResolvedProgram) -> int:
    """Return the inputs that a stage of 1F1B saves: those that wait, and that of the tick."""
    stages, batch, pipeline = program.mesh.axes["stage"], program.batch, program.pipeline
    waiting = stored_stage_inputs(
        pipeline.schedule, stages, pipeline.virtual_stages, batch.microbatches
    )
    return waiting + 1


def _transposed(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> float:
    """Return the bytes of weights that XLA transposes before the loop, to gather their first rows.

    They are those of which fsdp shards another dimension than the first of a layer. Quantized
    weights, of which no compiled program was read, are not counted.
    """
    return sum(
        each.parameter_bytes
        for each in weights
        if each.in_layers and "fsdp" in each.stored and each.spec.axes[-1] == "embed"
        if len(each.spec.shape) > 2 and not _is_quantized(program, each)
    )


def _is_quantized(program: ResolvedProgram, weight: ShardedWeight) -> bool:
    adapter = program.adapter
    return weight.frozen and adapter is not None and is_quantized(weight.path, weight.spec, adapter)


def _has_fsdp(weights: Sequence[ShardedWeight]) -> bool:
    return any("fsdp" in weight.stored for weight in weights)


def saved_in_stage(
    program: ResolvedProgram, sizes: DeviceSizes, layers: float, layer: float
) -> float:
    """Return the bytes that a stage saves in its ticks, with `layer` bytes for each layer."""
    stages = program.mesh.axes["stage"]
    schedule, rounds = program.pipeline.schedule, program.pipeline.virtual_stages
    stream = stage_input(program, sizes)
    ticks = program.batch.microbatches * rounds + stages - 1
    chunk = layers / rounds
    if schedule == "1f1b":
        return _stored_inputs(program) * stream + chunk * layer
    if not program.pipeline.recomputes_stages(program.model.remat):
        return ticks * chunk * layer
    return ticks * stream + chunk * layer


def stage_input(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of the residual streams of a microbatch, which a stage passes on.

    DPO has two: that of the policy and that of the reference model.
    """
    return (2 if program.loss.kind == "dpo" else 1) * _stream(program, sizes)


def _stream(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of the residual stream of a microbatch in one model."""
    return sizes.sequences * sizes.seq_residual * program.model.embed * sizes.item_bytes
