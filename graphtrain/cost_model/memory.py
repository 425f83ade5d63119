"""Memory per device of a training step, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Memory
from graphtrain.cost_model.head_memory import (
    cast_embedding,
    logits_of_one_chunk,
    pending_head_gradient,
    summed_head,
)
from graphtrain.cost_model.layer_memory import gathered_weights, layer_arrays, partial_sums
from graphtrain.cost_model.pipeline_memory import logits_of_stage, stage_peak
from graphtrain.cost_model.saved_activations import (
    saved_activations,
    saved_in_front,
    saved_in_ticks,
)
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.tower import tower_program
from graphtrain.cost_model.tower_memory import with_projection, with_tower
from graphtrain.cost_model.weights import ShardedWeight, shard_weights
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.models.in_place_gradients import adds_in_place
from sharding_rules.arrays import Role


def memory(program: ResolvedProgram, weights: Sequence[ShardedWeight] | None = None) -> Memory:
    """Estimate the peak memory of a device in a training step.

    The peak is in the backward pass: state, gradients so far, activations that the forward pass
    saved for every layer, and the arrays of the current layer. At the start of the backward pass
    the logits exist instead of the layers' gradients and the current layer's arrays.

    Args:
        program: the program.
        weights: result of shard_weights, if the caller has it.
    """
    if weights is None:
        weights = shard_weights(program)
    of_layers, of_tower = _memory_of_layers(program, weights), tower_program(program)
    if of_tower is None:
        return of_layers
    tower = with_projection(_memory_of_layers(of_tower, shard_weights(of_tower)), program)
    return with_tower(program, of_layers, tower, _gradients(program, weights))


def _memory_of_layers(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> Memory:
    """Return the memory of a step of a native model, without a vision tower."""
    mesh = program.mesh
    sizes = DeviceSizes.of(program)
    flash = step_uses_flash_kernel(program)
    activations = saved_activations(program, sizes, flash)
    gradients = _gradients_at_layer(program, weights)
    pending_bytes = pending_head_gradient(program, sizes, weights)
    temporaries = sum(layer_arrays(program, sizes, weights, flash).values()) + pending_bytes
    temporaries += partial_sums(program, sizes)
    if flash and mesh.axes.get("stage", 1) == 1:
        phases = (gradients, temporaries), _at_logits(program, weights, sizes)
        gradients, temporaries = max(phases, key=sum)
    elif flash and program.target.platform == "cuda":
        saved = saved_in_front(program, sizes, flash), saved_in_ticks(program, sizes, flash)
        gradients, activations, temporaries = stage_peak(program, weights, sizes, *saved)
    else:
        gathered_bytes = gathered_weights(weights, mesh) + pending_bytes
        temporaries = max(temporaries, _logits_of(program, sizes) + gathered_bytes)
    frozen = sum(weight.parameter_bytes for weight in weights if weight.frozen)
    parameters = sum(weight.parameter_bytes for weight in weights) - frozen
    moments = sum(weight.moment_bytes for weight in weights)
    optimizer = 0 if program.optimizer.offload_to_host else moments
    peak = parameters + frozen + optimizer + gradients + activations + temporaries
    return Memory(
        parameters=parameters,
        optimizer=optimizer,
        gradients=round(gradients),
        activations=round(activations),
        temporaries=round(temporaries),
        peak=round(peak),
        capacity=program.target.usable_memory_bytes,
        source="estimate",
        frozen=frozen,
    )


def lower_bound(program: ResolvedProgram) -> int:
    """Return a lower bound, in bytes, for any schedule of a remat policy.

    It counts the state, one gradient of each trained weight, and the saved activations.
    """
    weights, sizes = shard_weights(program), DeviceSizes.of(program)
    assert program.model.head_dim
    sizes = replace(sizes, head_dim=program.model.head_dim)  # without padding
    state_bytes = sum(weight.parameter_bytes for weight in weights)
    if not program.optimizer.offload_to_host:
        state_bytes += sum(weight.moment_bytes for weight in weights)
    activations = saved_activations(program, sizes, step_uses_flash_kernel(program))
    tower = tower_program(program)
    of_tower = 0 if tower is None else lower_bound(tower)
    return round(state_bytes + _one_gradient(program, weights) + activations) + of_tower


def largest(program: ResolvedProgram, count: int = 5) -> dict[str, int]:
    """Return the largest arrays, and groups of them, per device at the peak: bytes by name.

    The order is largest first.
    """
    weights, sizes = shard_weights(program), DeviceSizes.of(program)
    flash = step_uses_flash_kernel(program)
    activations = saved_activations(program, sizes, flash)
    if flash and program.mesh.axes.get("stage", 1) == 1:
        logits = _at_logits(program, weights, sizes)[1]
    else:
        logits = _logits_of(program, sizes)
    bytes_by_name = {
        f"activations that {sizes.layers:g} layers save for the backward pass": activations,
        "logits and their gradient": logits,
        "gradients of all weights": _gradients(program, weights),
    } | layer_arrays(program, sizes, weights, flash)
    for weight in weights:
        kind = "frozen" if weight.frozen else "parameters"
        bytes_by_name[f"{kind}/{weight.path}"] = weight.parameter_bytes
        if not weight.frozen and not program.optimizer.offload_to_host:
            bytes_by_name[f"optimizer moments of {weight.path}"] = weight.moment_bytes
    if (tower := tower_program(program)) is not None:
        of_tower = largest(tower, count)
        bytes_by_name |= {f"vision tower: {name}": size for name, size in of_tower.items()}
    ranked = sorted(bytes_by_name, key=lambda name: bytes_by_name[name], reverse=True)
    return {name: round(bytes_by_name[name]) for name in ranked[:count]}


def all_gradients(
    program: ResolvedProgram, weights: Sequence[ShardedWeight] | None = None
) -> float:
    """Return the bytes of float32 gradients that a step writes and its update reads.

    At the peak some of them may not exist yet, or no longer: memory() counts those that do.

    Args:
        program: The program.
        weights: Result of shard_weights, if the caller has it.
    """
    own = _gradients(program, shard_weights(program) if weights is None else weights)
    tower = tower_program(program)
    return own if tower is None else own + all_gradients(tower)


def _gradients(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> float:
    """Return the bytes of float32 gradients.

    During gradient accumulation these are the sums, to which layers of the native model add in
    place. With per_step reduction, adapters, and in imported models, the newest gradients of the
    layers exist beside them. XLA shards the sums as the moments are, where each microbatch's
    gradients are reduced.
    """
    sums, mesh, batch = _one_gradient(program, weights), program.mesh, program.batch
    if mesh.axes.get("stage", 1) > 1 or batch.microbatches == 1:
        return sums
    is_per_step = batch.gradient_reduction == "per_step"
    if not is_per_step and adds_in_place(program):
        return sums
    role: Role = "gradient" if is_per_step else "optimizer"
    newest = sum(
        weight.elements(role, mesh) for weight in weights if weight.in_layers and not weight.frozen
    )
    return sums + 4 * newest


def _gradients_at_layer(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> float:
    """Return the bytes of gradients while the layers' backward pass runs.

    On TPUs, the gradient of an embedding that is not the head follows it, if there are no sums.
    """
    is_later = program.target.platform == "tpu" and program.batch.microbatches == 1
    embedding = [weight for weight in weights if weight.path == "embedding/tokens"]
    if not is_later or program.model.tie_word_embeddings:
        embedding = []
    return _gradients(program, weights) - _one_gradient(program, embedding)


def _one_gradient(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> float:
    """Return the bytes of one float32 gradient of each trained weight."""
    batch, mesh = program.batch, program.mesh
    role: Role = "optimizer"
    if mesh.axes.get("stage", 1) > 1:
        role = "parameter"
    elif batch.microbatches > 1 and batch.gradient_reduction == "per_step":
        role = "gradient"
    return 4 * sum(weight.elements(role, mesh) for weight in weights if not weight.frozen)


def _at_logits(
    program: ResolvedProgram, weights: Sequence[ShardedWeight], sizes: DeviceSizes
) -> tuple[float, float]:
    """Return the bytes of gradients and of temporaries when the backward pass begins.

    Gradients are sums of earlier microbatches and, on GPUs, gradients of weights outside of the
    layers. Temporaries are logits with their gradient in the model's dtype and, on TPUs, a cast
    embedding, and gradients of the weights outside of the layers before they are scattered.
    """
    mesh, target = program.mesh, program.target
    outside = [each for each in weights if not each.in_layers]
    gradients = _gradients(program, outside) if target.platform == "cuda" else 0.0
    if program.batch.microbatches > 1:
        sums = sum(each.elements("optimizer", mesh) for each in weights if not each.frozen)
        gradients = max(gradients, 4 * sums)
    if sizes.head_blocks > 1:  # on GPUs
        return gradients, logits_of_one_chunk(sizes, weights, mesh)
    logits = _rounded_logits(program, sizes) + cast_embedding(program, weights)
    if sizes.in_chunks:
        return gradients, logits + summed_head(weights, mesh)
    if target.platform == "tpu":
        logits += 4 * sum(each.used_of_a_layer(mesh) for each in outside if not each.frozen)
    return gradients, logits


def _rounded_logits(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of float32 logits, and of their gradient in the model's dtype.

    The LM head of an imported module returns logits in the model's dtype, which XLA for GPUs
    converts where it reads them. DPO has the float32 logits of the policy and of the reference
    model, which the gradient replaces.
    """
    if program.loss.kind == "dpo" and not program.stands_for_imported:
        return 2 * 4 * sizes.scored_positions * sizes.sequences * sizes.vocab
    is_float32 = not (program.stands_for_imported and program.target.platform == "cuda")
    scored = (4 if is_float32 else sizes.item_bytes) * sizes.scored_positions
    return (scored + sizes.item_bytes * sizes.logit_positions) * sizes.sequences * sizes.vocab


def _logits_of(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of logits and their gradient: in float32, or rounded in a pipeline."""
    if program.mesh.axes.get("stage", 1) > 1:
        return logits_of_stage(program, sizes)
    return 2 * 4 * sizes.sequences * sizes.logit_positions * sizes.vocab
