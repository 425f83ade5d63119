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
from graphtrain.cost_model.mixture_memory import ExpertSizes
from graphtrain.cost_model.pipeline_memory import (
    LayerWork,
    logits_of_stage,
    saved_in_stage,
    stage_peak,
)
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.tower import tower_program
from graphtrain.cost_model.tower_memory import with_projection, with_tower
from graphtrain.cost_model.weights import ShardedWeight, shard_weights
from graphtrain.models.attention.kernel_support import RING_TILE, step_uses_flash_kernel
from graphtrain.models.flops import is_gated
from graphtrain.models.in_place_gradients import adds_in_place
from graphtrain.models.mlp_block_count import BLOCK_ARRAYS, mlp_block_count
from sharding_rules.arrays import Role
from sharding_rules.mesh import MeshShape

# Partial sums that exist at once; fitted to programs for h100:64, b200:64 and v5p:4x4x4.
_PARTIAL_SUMS = 3


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
    activations = _saved_activations(program, sizes, flash)
    gradients = _gradients_at_layer(program, weights)
    pending_bytes = pending_head_gradient(program, sizes, weights)
    temporaries = sum(_at_layer(program, sizes, weights, flash).values()) + pending_bytes
    temporaries += _partial_sums(program, sizes)
    if flash and mesh.axes.get("stage", 1) == 1:
        phases = (gradients, temporaries), _at_logits(program, weights, sizes)
        gradients, temporaries = max(phases, key=sum)
    elif flash and program.target.platform == "cuda":
        work = LayerWork(_layer_in_stage(program, sizes), _partial_sums(program, sizes))
        gradients, activations, temporaries = stage_peak(program, weights, sizes, work, activations)
    else:
        gathered_bytes = _gathered(weights, mesh) + pending_bytes
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
    activations = _saved_activations(program, sizes, step_uses_flash_kernel(program))
    tower = tower_program(program)
    of_tower = 0 if tower is None else lower_bound(tower)
    return round(state_bytes + _one_gradient(program, weights) + activations) + of_tower


def largest(program: ResolvedProgram, count: int = 5) -> dict[str, int]:
    """Return the largest arrays, and groups of them, per device at the peak: bytes by name.

    The order is largest first.
    """
    weights, sizes = shard_weights(program), DeviceSizes.of(program)
    flash = step_uses_flash_kernel(program)
    activations = _saved_activations(program, sizes, flash)
    if flash and program.mesh.axes.get("stage", 1) == 1:
        logits = _at_logits(program, weights, sizes)[1]
    else:
        logits = _logits_of(program, sizes)
    bytes_by_name = {
        f"activations that {sizes.layers:g} layers save for the backward pass": activations,
        "logits and their gradient": logits,
        "gradients of all weights": _gradients(program, weights),
    } | _at_layer(program, sizes, weights, flash)
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


def saved_by_layers(program: ResolvedProgram) -> float:
    """Return the bytes of activations that a device's layers save of one microbatch."""
    sizes, flash = DeviceSizes.of(program), step_uses_flash_kernel(program)
    blocks = sizes.layers * program.model.layers / program.model.depth
    dense = _saved_per_layer(program, replace(sizes, mlp=sizes.dense_mlp), flash)
    return blocks * _saved_by_block(program, sizes, flash) + (sizes.layers - blocks) * dense


def _saved_activations(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes of activations that the forward pass saves for the backward pass.

    A pipeline stage saves the input of every tick (1F1B: those that wait, and that of the tick) and
    recomputes one chunk at a time; a stage that is not recomputed saves the activations of all
    chunks. Layers in front of the stages, such as dense layers before a mixture, run through all
    microbatches of a stage before its first tick, and through their backward pass after the last.
    """
    layer, stages = _saved_by_block(program, sizes, flash), program.mesh.axes.get("stage", 1)
    in_dense_layers = _saved_in_dense_layers(program, sizes, flash)
    if stages == 1:
        return program.model.layers * layer + in_dense_layers
    outside, rounds = program.layers_outside, program.pipeline.virtual_stages
    own_layers = sizes.layers * program.model.layers / program.model.depth
    own_layers -= -(-outside // rounds) * rounds  # with_padding_layers has as many for each chunk
    in_front = outside * _embedded_microbatches(program) * layer
    return in_dense_layers + in_front + saved_in_stage(program, sizes, own_layers, layer)


def _embedded_microbatches(program: ResolvedProgram) -> float:
    """Return the number of microbatches that a device embeds at once."""
    stages = program.mesh.axes.get("stage", 1)
    return program.batch.microbatches / stages if stages > 1 else 1


def _saved_in_dense_layers(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes that dense layers save, of all microbatches that a stage embeds."""
    one = _saved_per_layer(program, replace(sizes, mlp=sizes.dense_mlp), flash)
    return program.model.dense_layers * _embedded_microbatches(program) * one


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


def _saved_by_block(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes that a block saves: a layer with an MLP or, of a mixture, with experts."""
    experts = ExpertSizes.of(program, sizes.sequences, sizes.seq_in_block)
    if experts is None:
        return _saved_per_layer(program, sizes, flash)
    around = _saved_per_layer(program, replace(sizes, mlp=sizes.shared), flash)
    return around + experts.saved(program.model.remat)


def _saved_per_layer(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes that the forward pass of a layer saves for its backward pass."""
    model = program.model
    assert model.head_dim
    tokens, inside = sizes.sequences * sizes.seq_residual, sizes.sequences * sizes.seq_in_block
    stream = tokens * model.embed * sizes.item_bytes
    hidden = inside * sizes.mlp * sizes.item_bytes * (2 if is_gated(model) else 1)
    # Native models save the heads of a token side by side, without padding.
    is_merged = model.remat == "dots" and not program.stands_for_imported
    head_dim = model.head_dim if is_merged else sizes.head_dim
    heads = inside * (sizes.heads + 2 * sizes.kv_heads) * head_dim * sizes.item_bytes
    products = heads + hidden + 2 * stream
    if flash:
        attention_output = inside * sizes.heads * (head_dim * sizes.item_bytes + 4)
        return _saved_with_kernel(program, stream, hidden, heads, attention_output)
    scores = sizes.sequences * sizes.heads * sizes.seq_in_block * sizes.kv_positions * 4
    if program.target.platform == "cpu":  # computed again: models/blocked.py
        scores = 0
    normed = stream * (2 if model.post_norm else 0) + heads * model.qk_norm
    everything = 2 * products + 2 * stream + normed
    return {
        "full": stream,
        "offload": stream,
        "dots": stream + products,
        "attention": everything,
        "none": everything + (3 if model.attn_logit_softcap else 2) * scores,
    }[model.remat]


def _saved_with_kernel(
    program: ResolvedProgram, stream: float, hidden: float, heads: float, attention_output: float
) -> float:
    """Return the bytes that a layer saves where attention is a kernel.

    The kernel saves its output and a log-sum-exp for each row of scores. XLA does not save the
    MLP's last product, which is only part of the next layer's input. Without recomputation it saves
    six values of the residual stream in float32, and each hidden value three times (read from a
    program compiled for h100:8).
    """
    streams = (4 if program.model.post_norm else 2) * stream
    normed = heads * program.model.qk_norm
    everything = 6 * 2 * stream + 3 * hidden + streams + heads + normed + attention_output
    return {
        "full": stream,
        "offload": stream,
        "dots": streams + heads + hidden + attention_output,
        "attention": everything,
        "none": everything,
    }[program.model.remat]


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
    logits = _rounded_logits(sizes) + cast_embedding(program, weights)
    if sizes.in_chunks:
        return gradients, logits + summed_head(weights, mesh)
    if target.platform == "tpu":
        logits += 4 * sum(each.used_of_a_layer(mesh) for each in outside if not each.frozen)
    return gradients, logits


def _at_layer(
    program: ResolvedProgram,
    sizes: DeviceSizes,
    weights: Sequence[ShardedWeight],
    flash: bool,
) -> dict[str, float]:
    """Return the bytes of groups of arrays in the backward pass of the current layer, by name."""
    if (blocks := mlp_block_count(program)) > 1 and flash:
        in_blocks = _layer_in_blocks(program, sizes, weights, blocks)
        return {f"one layer, with its MLP in {blocks} blocks and gathered weights": in_blocks}
    return {
        "one layer's scores or MLP hidden values with gradients": _current_layer(
            program, sizes, flash
        ),
        "gathered weights of two layers": _gathered(weights, program.mesh),
    }


def _current_layer(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes of the current layer: its attention scores, or the MLP's hidden values.

    Scores and the gradient of their softmax are float32, and products read them in bfloat16: on
    TPUs the probabilities, plus the mask in bytes; on GPUs also the gradient, in the layout that
    its library requires.
    """
    inside = sizes.sequences * sizes.seq_in_block
    queries, keys = sizes.seq_in_block, sizes.kv_positions
    if keys < program.batch.seq_len:  # a ring: a tile of queries with a half of a device's keys
        queries, keys = min(RING_TILE, queries / 2), keys / 2
    scores = sizes.sequences * sizes.heads * queries * keys
    each = 2 * 4 + (2 + 1 if program.target.platform == "tpu" else 2 * 2)
    experts = ExpertSizes.of(program, sizes.sequences, sizes.seq_in_block)
    mlp = sizes.mlp if experts is None else sizes.shared
    wide = inside * mlp * sizes.item_bytes * (4 if is_gated(program.model) else 2)
    wide += experts.computed(program.model.remat) if experts else 0.0
    return wide if flash else max(each * scores, wide)


def _layer_in_blocks(
    program: ResolvedProgram,
    sizes: DeviceSizes,
    weights: Sequence[ShardedWeight],
    blocks: int,
) -> float:
    """Return the bytes of the current layer, whose MLP runs in blocks.

    In the backward pass of the MLP there are, in addition to a block's hidden values, weights in
    bfloat16 and gradients in float32: four arrays of the residual stream, queries, keys, values,
    attention's output, and gathered weights of attention. In that of attention: two arrays of the
    stream, the four and their gradients, with keys and values repeated for the kernel, and the
    gathered weights of queries, keys and values.
    """
    model = program.model
    assert model.head_dim
    inside = sizes.sequences * sizes.seq_in_block * sizes.item_bytes
    by_path = {each.path: each.used_of_a_layer(program.mesh) for each in weights if each.in_layers}
    in_mlp = sum(size for path, size in by_path.items() if "/mlp/" in path)
    in_attention = sum(by_path.values()) - in_mlp
    in_output = sum(size for path, size in by_path.items() if path.endswith("/attention/output"))
    heads = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    hidden = BLOCK_ARRAYS[is_gated(model)] * sizes.mlp / blocks
    of_mlp = inside * (4 * model.embed + heads + hidden) + 2 * in_attention
    of_attention = inside * (2 * model.embed + 8 * sizes.heads * sizes.head_dim)
    return max(of_mlp + (2 + 4) * in_mlp / blocks, of_attention + 2 * (in_attention - in_output))


def _layer_in_stage(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of the current layer's hidden values in a GPU's pipeline stage."""
    if program.model.moe is not None or program.model.remat != "full":
        return _current_layer(program, sizes, flash=True)
    inside = sizes.sequences * sizes.seq_in_block * sizes.item_bytes
    return inside * sizes.mlp * (6 if is_gated(program.model) else 3)


def _partial_sums(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of partial sums between devices that shard heads or the MLP.

    A GPU program transposes each partial sum before it is reduced and scattered by position, so
    that two exist. A TPU program that recomputes a layer from its input has as many gathered
    inputs: of attention, of the MLP, and the gradient of its output.
    """
    rules, platform = program.rules, program.target.platform
    summed = {name for axis in ("heads", "mlp") for name in rules.activations.get(axis, ())}
    scattered = summed & set(rules.activations.get("residual", ()))
    if platform not in ("cuda", "tpu") or program.mesh.size(tuple(scattered)) == 1:
        return 0.0
    arrays = _PARTIAL_SUMS * (2 if platform == "cuda" or program.model.remat == "full" else 1)
    stream = sizes.sequences * sizes.seq_in_block * program.model.embed * sizes.item_bytes
    return arrays * stream


def _rounded_logits(sizes: DeviceSizes) -> float:
    """Return the bytes of float32 logits, and of their gradient in the model's dtype."""
    positions = 4 * sizes.scored_positions + sizes.item_bytes * sizes.logit_positions
    return positions * sizes.sequences * sizes.vocab


def _logits_of(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of logits and their gradient: in float32, or rounded in a pipeline."""
    if program.mesh.axes.get("stage", 1) > 1:
        return logits_of_stage(program, sizes)
    return 2 * 4 * sizes.sequences * sizes.logit_positions * sizes.vocab


def _gathered(weights: Sequence[ShardedWeight], mesh: MeshShape) -> float:
    """Return the bytes of gathered bfloat16 weights, of the current layer and the next one."""
    return 2 * 2 * sum(weight.used_of_a_layer(mesh) for weight in weights if weight.in_layers)
