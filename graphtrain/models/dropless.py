"""Experts of a dropless mixture: tokens sorted by expert, and products of their groups.

Devices along the experts' mesh axes all-gather their tokens, sort them by expert, multiply each
group by its expert's weights (a ragged product; on NVIDIA GPUs the kernels of
`models.grouped_matmul`), and reduce-scatter each token's sum. Shapes are static, so buffers are
large enough for the case that all tokens choose the experts of one device. Kernels and TPUs
multiply only the rows that do; see `grouped_matmul_support`.

Source: Gale et al. 2022, "MegaBlocks", https://arxiv.org/abs/2211.15841
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from graphtrain.models.block_products import multiply_blocks
from graphtrain.models.grouped_matmul import arrange, grouped_matmul
from graphtrain.models.grouped_matmul_support import (
    BLOCK,
    rows_of_block,
    why_no_grouped_matmul,
)
from graphtrain.models.matmul import dot
from graphtrain.models.projection import PROJECTION
from lowering.tracing.constrain import mesh_axes_of, placement
from lowering.tracing.current_target import traced_target

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

# Products with gate and up -> hidden values, the input of down.
GateUpFunction = Callable[[list[jax.Array]], jax.Array]


class ExpertWeight(NamedTuple):
    """Matrices of experts (experts, in, out), and their LoRA factors with the scale in one."""

    weight: Any
    a: Any = None  # (experts, in, rank); None: no adapter
    b: Any = None  # (experts, rank, out)

    def with_factors(self, other: ExpertWeight) -> ExpertWeight:
        """Return `other`, without factors where this has none."""
        return other if self.a is not None else ExpertWeight(other.weight)

    def merged(self, dtype: DTypeLike) -> jax.Array:
        """Return the weights plus the products of the factors."""
        if self.a is None:
            return self.weight.astype(dtype)
        product = dot("xir,xro->xio", self.a, self.b, jnp.float32)
        return (self.weight.astype(jnp.float32) + product).astype(dtype)


def dropless_experts(
    combine: GateUpFunction,
    x: Float[Array, "batch seq embed"],
    shares: Float[Array, "batch seq choices"],
    experts: Int[Array, "batch seq choices"],
    gate_up: list[ExpertWeight],
    down: ExpertWeight,
    biases: list[jax.Array] | None = None,
    loops: bool = False,
) -> Float[Array, "batch seq embed"]:
    """Apply to each token the experts that it chose, without dropping any (dropless MoE).

    Args:
        combine: Computes hidden values, the input of `down`, from the products with `gate_up`.
        x: Tokens.
        shares: Weights of the chosen experts in the token's result.
        experts: Indices of the chosen experts.
        gate_up: Gate and up weights, or up alone, each (experts, embed, mlp).
        down: Down weights (experts, mlp, embed).
        biases: Biases (experts, mlp) of the products with `gate_up`; without them, there are none.
        loops: Whether machines without kernels multiply in loops over blocks of rows, if a device
            has all experts and enough choices.

    LoRA factors are added to the products; kernels multiply by the merged weights.
    """
    biases = biases or []
    context = placement()
    run = partial(_sorted_experts, combine, loops)
    tokens, expert_axes, mlp_axes = (
        (mesh_axes_of("batch") or None, mesh_axes_of("seq") or None),
        mesh_axes_of("experts"),
        mesh_axes_of("mlp"),
    )
    axes = {name for names in (*tokens, expert_axes, mlp_axes) if names for name in names}
    if context is None or not axes:
        return run((), (), x, shares, experts, gate_up, down, biases)
    # Axes of one device too, so that all are manual in a pipeline: XLA of jax 0.11 aborts if some
    # are automatic and an axis of the outer shard_map is not the first of the mesh.
    axes |= {name for name, size in context.shape.axes.items() if size == 1} - {*context.manual}
    token_spec = PartitionSpec(*tokens)
    expert, mlp = expert_axes or None, mlp_axes or None
    whole = PartitionSpec(expert)
    wide, narrow = PartitionSpec(expert, None, mlp), PartitionSpec(expert, mlp)
    gate_up_specs = [each.with_factors(ExpertWeight(wide, whole, wide)) for each in gate_up]
    down_spec = down.with_factors(ExpertWeight(narrow, narrow, whole))
    weight_specs = gate_up_specs, down_spec, [narrow] * len(biases)
    return jax.shard_map(
        partial(run, expert_axes, mlp_axes),
        mesh=context.current_mesh,
        in_specs=(token_spec, token_spec, token_spec, *weight_specs),
        out_specs=token_spec,
        axis_names=axes,
        check_vma=False,
    )(x, shares, experts, gate_up, down, biases)


def _sorted_experts(
    combine: GateUpFunction,
    loops: bool,
    expert_axes: tuple[str, ...],
    mlp_axes: tuple[str, ...],
    x: jax.Array,
    shares: jax.Array,
    experts: jax.Array,
    gate_up_weights: list[ExpertWeight],
    down: ExpertWeight,
    biases: list[jax.Array],
) -> jax.Array:
    """Apply the experts of this device to the tokens of all devices that share them.

    Args:
        combine: As in dropless_experts.
        loops: As in dropless_experts.
        expert_axes: Mesh axes that shard the experts.
        mlp_axes: Mesh axes that shard the hidden width of an expert.
        x: Tokens of this device (batch, seq, embed).
        shares: Weights of their chosen experts (batch, seq, choices).
        experts: Global indices of their chosen experts (batch, seq, choices).
        gate_up_weights: This device's shard of the gate and up weights.
        down: This device's shard of the down weights.
        biases: This device's shard of the biases of gate and up; [] without biases.
    """
    shape = x.shape
    tokens = [array.reshape(-1, array.shape[-1]) for array in (x, shares, experts)]
    if expert_axes:
        tokens = [_gather(array, expert_axes) for array in tokens]
    x, shares, experts = tokens
    shards = jax.lax.axis_size(expert_axes) if expert_axes else 1
    first_expert = jax.lax.axis_index(expert_axes) * len(down.weight) if expert_axes else 0
    is_local = (experts >= first_expert) & (experts < first_expert + len(down.weight))
    local_experts = jnp.where(is_local, experts - first_expert, len(down.weight))
    local_shares = jnp.where(is_local, shares, 0)
    block = rows_of_block(experts.size, len(down.weight)) if loops and shards == 1 else 0
    if _has_grouped_matmul(down.weight, experts.size):
        apply = _experts_in_blocks
    elif block:
        apply = partial(_experts_in_blocks, loop_block=block)
    else:
        apply = _experts_by_ragged_product
    total = apply(combine, x, local_shares, local_experts, gate_up_weights, down, biases, shards)
    if mlp_axes:
        total = jax.lax.psum(total, mlp_axes)
    if expert_axes:
        total = jax.lax.psum_scatter(total, expert_axes, tiled=True)
    return total.reshape(shape).astype(x.dtype)


def _gather(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All-gather the first dimension over mesh axes, in float32 on CPUs.

    The gradient is a reduce-scatter, and XLA:CPU aborts on one of bfloat16 inside a shard_map
    (jaxlib 0.10). It sends 16-bit floats as float32 anyway.
    """
    target, sent = traced_target(), array
    if target is not None and target.platform == "cpu" and array.dtype != jnp.float32:
        sent = array.astype(jnp.float32)
    return jax.lax.all_gather(sent, axes, tiled=True).astype(array.dtype)


def _has_grouped_matmul(down: jax.Array, choices: int) -> bool:
    target = traced_target()
    if target is None:
        return False
    experts, mlp, embed = down.shape
    return not why_no_grouped_matmul(target, experts, embed, mlp, choices)


def _experts_by_ragged_product(
    combine: GateUpFunction,
    x: jax.Array,
    shares: jax.Array,
    experts: jax.Array,
    gate_up_weights: list[ExpertWeight],
    down: ExpertWeight,
    biases: list[jax.Array],
    shards: int,
) -> jax.Array:
    """Return each token's float32 sum over its choices of this device's experts.

    Args:
        combine: As in dropless_experts.
        x: Tokens (tokens, embed).
        shares: Weights of their chosen experts (tokens, choices); 0 for experts of other devices.
        experts: Chosen experts, counted on this device; its number of experts for others.
        gate_up_weights: Gate and up weights of this device's experts.
        down: Down weights of this device's experts.
        biases: Biases of gate and up of this device's experts; [] without biases.
        shards: Number of devices over which the experts are sharded.
    """
    del shards
    chosen, sort_key = experts.shape[-1], experts.reshape(-1)
    order = jnp.argsort(sort_key, stable=True)  # choices of other devices' experts sort last
    # A sum of comparisons: bincount is an integer scatter-add, which Neuron does not support.
    sizes = (sort_key[:, None] == jnp.arange(len(down.weight))).sum(0, dtype=jnp.int32)
    rows = jnp.take(x, order // chosen, axis=0)

    def product(rows: jax.Array, of_experts: ExpertWeight) -> jax.Array:
        result = _ragged(rows, of_experts.weight, sizes)
        if of_experts.a is None or of_experts.b is None:
            return result
        with jax.named_scope("adapter"):
            return result + _ragged(_ragged(rows, of_experts.a, sizes), of_experts.b, sizes)

    projections = [checkpoint_name(product(rows, w), PROJECTION) for w in gate_up_weights]
    of_rows = [jnp.take(bias, sort_key[order], axis=0, mode="clip") for bias in biases]
    hidden = combine(add_biases(projections, of_rows))
    out = checkpoint_name(product(hidden, down), PROJECTION).astype(jnp.float32)
    share = shares.reshape(-1)[order]
    return jnp.zeros((len(x), out.shape[-1])).at[order // chosen].add(out * share[:, None])


def _experts_in_blocks(
    combine: GateUpFunction,
    x: jax.Array,
    shares: jax.Array,
    experts: jax.Array,
    gate_up_weights: list[ExpertWeight],
    down: ExpertWeight,
    biases: list[jax.Array],
    shards: int,
    loop_block: int = 0,
) -> jax.Array:
    """Return what _experts_by_ragged_product does, with products of blocks of rows.

    They are kernels; or loops over blocks of `loop_block` rows.
    """
    chosen, block = experts.shape[-1], loop_block or BLOCK
    blocks = arrange(experts.reshape(-1), len(down.weight), block)
    tokens = (
        jnp.full(blocks.rows, len(x))
        .at[blocks.slots]
        .set(jnp.arange(experts.size) // chosen, mode="drop")
    )  # padding is a row of zeros
    rows = jnp.take(x, tokens, axis=0, mode="fill", fill_value=0)
    # The last block of an expert is half full on average.
    expected = experts.size // shards + len(down.weight) * BLOCK // 2

    def product(rows: jax.Array, weights: ExpertWeight) -> jax.Array:
        merged = weights.merged(rows.dtype)
        if loop_block:
            out = multiply_blocks(rows, merged, blocks.experts)
        else:
            out = grouped_matmul(rows, merged, blocks, expected)
        return checkpoint_name(out, PROJECTION)

    of_rows = [jnp.repeat(bias[blocks.experts], block, axis=0) for bias in biases]
    hidden = combine(add_biases([product(rows, each) for each in gate_up_weights], of_rows))
    out = product(hidden, down)
    choices = jnp.take(out, blocks.slots, axis=0, mode="fill", fill_value=0)
    choices = choices.reshape(*experts.shape, -1).astype(jnp.float32)
    return (choices * shares[..., None]).sum(1)


def add_biases(products: list[jax.Array], biases: list[jax.Array]) -> list[jax.Array]:
    """Add biases to products, whose gradients are summed in float32; [] changes nothing."""
    if not biases:
        return products
    pairs = zip(products, biases, strict=True)
    return [(x.astype(jnp.float32) + bias).astype(x.dtype) for x, bias in pairs]


def _ragged(rows: jax.Array, expert_weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply groups of rows, each by its expert's matrix; rows after the last group are zero."""
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    out = jax.lax.ragged_dot(
        rows,
        expert_weights.astype(rows.dtype),
        sizes,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    is_assigned = jnp.arange(len(rows)) < sizes.sum()
    return jnp.where(is_assigned[:, None], out, 0).astype(rows.dtype)
