"""Memory of the layer whose backward pass is computed, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import scored_layers
from graphtrain.cost_model.mixture_memory import ExpertSizes
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import ShardedWeight
from graphtrain.models.attention.kernel_support import RING_TILE, step_uses_flash_kernel
from graphtrain.models.flops import is_gated
from graphtrain.models.mlp_block_count import BLOCK_ARRAYS, mlp_block_count
from sharding_rules.mesh import MeshShape

# Partial sums that exist at once; fitted to programs for h100:64, b200:64 and v5p:4x4x4.
_PARTIAL_SUMS = 3


def layer_arrays(
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
        "one layer's scores or MLP hidden values with gradients": current_layer(
            program, sizes, flash
        ),
        "gathered weights of two layers": gathered_weights(weights, program.mesh),
    }


def current_layer(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
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
    return wide if flash or not scored_layers(program.model) else max(each * scores, wide)


def _layer_in_blocks(
    program: ResolvedProgram,
    sizes: DeviceSizes,
    weights: Sequence[ShardedWeight],
    blocks: int,
) -> float:
    """Return the bytes of the current layer, whose MLP runs in blocks.

    In the backward pass of the MLP there are, in addition to a block's hidden values, weights in
    bfloat16 and gradients in float32: arrays of the residual stream, queries, keys, values,
    attention's output, and gathered weights of attention. In that of attention: arrays of the
    stream, the four and their gradients, with keys and values repeated for the kernel, and the
    gathered weights of queries, keys and values.
    """
    model = program.model
    assert model.head_dim
    inside = sizes.sequences * sizes.seq_in_block * sizes.item_bytes
    streams_in_mlp, streams_in_attention = _streams(program, sizes)
    by_path = {each.path: each.used_of_a_layer(program.mesh) for each in weights if each.in_layers}
    in_mlp = sum(size for path, size in by_path.items() if "/mlp/" in path)
    in_attention = sum(by_path.values()) - in_mlp
    in_output = sum(size for path, size in by_path.items() if path.endswith("/attention/output"))
    heads = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    hidden = BLOCK_ARRAYS[is_gated(model)] * sizes.mlp / blocks
    of_mlp = inside * (streams_in_mlp * model.embed + heads + hidden) + 2 * in_attention
    of_attention = inside * (streams_in_attention * model.embed + 8 * sizes.heads * sizes.head_dim)
    return max(of_mlp + (2 + 4) * in_mlp / blocks, of_attention + 2 * (in_attention - in_output))


def _streams(program: ResolvedProgram, sizes: DeviceSizes) -> tuple[float, float]:
    """Return how many arrays of the stream a layer in blocks has, in the MLP and in attention.

    In the MLP: its input, the sum of the input's gradient, the gradient of its output, and the
    stream before the MLP's norm. Where the stream is gathered for the MLP, shards of the last two
    exist beside three gathered arrays. TPUs then also have attention's input, which they do not
    gather again, and what a block adds to the sum. Latent attention keeps its normed input
    everywhere. In attention: the stream and its gradient, and partial sums where devices reduce
    them.
    """
    is_latent = program.model.latent_attention is not None
    if sizes.seq_residual == sizes.seq_in_block:
        return 4 + is_latent, 2
    shards = 2 * sizes.seq_residual / sizes.seq_in_block
    on_tpu = program.target.platform == "tpu"
    return 3 + (on_tpu or is_latent) + on_tpu + shards, 2 + shards + (
        2 if on_tpu else _PARTIAL_SUMS
    )


def partial_sums(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of partial sums between devices that shard heads or the MLP.

    With MLPs in blocks they are part of the current layer.

    A GPU program transposes each partial sum before it is reduced and scattered by position, so
    that two exist. A TPU program that recomputes a layer from its input has as many gathered
    inputs: of attention, of the MLP, and the gradient of its output.
    """
    rules, platform = program.rules, program.target.platform
    summed = {name for axis in ("heads", "mlp") for name in rules.activations.get(axis, ())}
    scattered = summed & set(rules.activations.get("residual", ()))
    if platform not in ("cuda", "tpu") or program.mesh.size(tuple(scattered)) == 1:
        return 0.0
    if mlp_block_count(program) > 1 and step_uses_flash_kernel(program):
        return 0.0
    arrays = _PARTIAL_SUMS * (2 if platform == "cuda" or program.model.remat == "full" else 1)
    stream = sizes.sequences * sizes.seq_in_block * program.model.embed * sizes.item_bytes
    return arrays * stream


def gathered_weights(weights: Sequence[ShardedWeight], mesh: MeshShape) -> float:
    """Return the bytes of gathered bfloat16 weights, of the current layer and the next one."""
    return 2 * 2 * sum(weight.used_of_a_layer(mesh) for weight in weights if weight.in_layers)
