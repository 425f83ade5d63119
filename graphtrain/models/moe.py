"""A mixture of experts in place of the MLP, with two ways to bring tokens to their experts.

With a capacity, every sequence has room for so many of its tokens at each expert, in the order of
the sequence; the rest pass by on the residual stream alone. Tokens travel to experts and back by
all-to-all, which the compiler makes of two placements of one buffer.

Without, no token is lost: devices along the experts' mesh axis give each other all their tokens
(all-gather), sort them by expert, multiply each run by its expert's weights (a ragged product),
and add up what belongs to a token (reduce-scatter). Shapes are static, so a device has room for the
case that all tokens choose its experts; it multiplies those that do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from graphtrain.config.schema import Mixture, Model
from graphtrain.models import init
from graphtrain.models.attention.ring_order import positions
from graphtrain.models.flops import is_gated
from graphtrain.models.lora.layers import whole
from graphtrain.models.matmul import dot
from graphtrain.models.mlp import ACTIVATIONS
from graphtrain.models.projection import PROJECTION, project, projects
from lowering.tracing.constrain import constrain, placement, split_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

Terms = dict[str, jax.Array]  # what the router adds to the loss
Combine = Callable[[list[jax.Array]], jax.Array]


class MixtureMLP(nnx.Module):
    """A router and its experts.

    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; without capacity: Gale et al.
    2022, "MegaBlocks", https://arxiv.org/abs/2211.15841
    """

    def __init__(self, model: Model, keys: init.Keys):
        assert model.mixture is not None
        self.model, self.mixture = model, model.mixture
        self.router = init.normal(model, keys, "embed", "routes")
        if is_gated(model):
            self.gate = init.normal(model, keys, "experts", "embed", "mlp")
        self.up = init.normal(model, keys, "experts", "embed", "mlp")
        self.down = init.normal(
            model, keys, "experts", "mlp", "embed", scale=(2 * model.layers) ** -0.5
        )

        if self.mixture.shared is not None:
            for name in self._shared_names():
                setattr(self, name, init.normal(model, keys, "embed", "shared"))
            self.shared_down = init.normal(
                model, keys, "shared", "embed", scale=(2 * model.layers) ** -0.5
            )
            self.shared_share = init.zeros(model, "embed")

    @jax.named_scope("mixture")
    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch seq embed"], Terms]:
        with jax.named_scope("router"):
            scores = dot("bse,er->bsr", x.astype(jnp.float32), self.router[...], jnp.float32)
            scores = constrain(scores, "batch", "seq", None)
        shares, experts = choose(scores, self.mixture)
        terms = router_losses(scores, experts, self.mixture, self.model.layers)
        if self.mixture.capacity is None:
            mixed = self._dropless(x, shares, experts)
        else:
            mixed = self._within_capacity(x, shares, experts, self.mixture.capacity)
        return (mixed if self.mixture.shared is None else mixed + self._shared(x)), terms

    @jax.named_scope("shared")
    def _shared(self, x: jax.Array) -> jax.Array:
        """The expert that every token has, times the token's share of it.

        Source: Qwen team 2024, "Qwen1.5-MoE", https://qwenlm.github.io/blog/qwen-moe/
        """
        activate = ACTIVATIONS[self.model.activation]
        wide = projects(self, self._shared_names(), "bse,em->bsm", x)
        *gate, up = (constrain(each, "batch", "seq", "shared") for each in wide)
        hidden = activate(gate[0]) * up if gate else activate(up)
        score = (x.astype(jnp.float32) * self.shared_share[...]).sum(-1, keepdims=True)
        share = jax.nn.sigmoid(score).astype(x.dtype)
        return project(self, "shared_down", "bsm,me->bse", hidden) * share

    def _shared_names(self) -> tuple[str, ...]:
        return ("shared_gate", "shared_up") if is_gated(self.model) else ("shared_up",)

    def _widths(self) -> list[jax.Array]:
        names = ("gate", "up") if is_gated(self.model) else ("up",)
        return [whole(getattr(self, name).get_value()) for name in names]

    def _within_capacity(
        self, x: jax.Array, shares: jax.Array, experts: jax.Array, capacity: float
    ) -> jax.Array:
        count, length = self.mixture.experts, x.shape[1]
        room = math.ceil(capacity * length * self.mixture.per_token / count)
        order = positions(length)  # a ring works on another order than the sequence's
        places = place_in_line(experts[:, jnp.argsort(order)], count)[:, order]
        kept = places < room
        slots = jnp.where(kept, experts * room + places, count * room)  # the last takes the rest
        # Which token is in each slot; an empty one holds a row of zeros behind the sequence.
        tokens = jnp.broadcast_to(jnp.arange(length)[:, None], slots.shape[1:])
        fill = jax.vmap(lambda at: jnp.full(count * room + 1, length).at[at].set(tokens))
        padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        taken = jnp.take_along_axis(padded, fill(slots)[:, :-1, None], axis=1)
        buffer = taken.reshape(len(x), count, room, -1)
        buffer = constrain(buffer, "grouped", "experts", "capacity", "embed")
        done = self._experts(buffer)
        done = constrain(done, "batch", None, "capacity", "embed").reshape(len(x), count * room, -1)
        done = jnp.pad(done, ((0, 0), (0, 1), (0, 0)))
        picked = jnp.take_along_axis(done, slots.reshape(len(x), -1, 1), axis=1)
        picked = picked.reshape(*slots.shape, -1)
        share = jnp.where(kept, shares, 0).astype(x.dtype)
        return jnp.einsum("bske,bsk->bse", picked, share)

    def _experts(self, buffer: jax.Array) -> jax.Array:
        """Every expert on its own tokens: (batch, experts, capacity, embed) to the same."""
        activate = ACTIVATIONS[self.model.activation]
        wide = [
            constrain(dot("bxce,xem->bxcm", buffer, w), "grouped", "experts", "capacity", "mlp")
            for w in self._widths()
        ]
        *gate, up = (checkpoint_name(each, PROJECTION) for each in wide)
        hidden = activate(gate[0]) * up if gate else activate(up)
        down = whole(self.down.get_value())
        out = checkpoint_name(dot("bxcm,xme->bxce", hidden, down), PROJECTION)
        return constrain(out, "grouped", "experts", "capacity", "embed")

    def _dropless(self, x: jax.Array, shares: jax.Array, experts: jax.Array) -> jax.Array:
        activate = ACTIVATIONS[self.model.activation]

        def combine(wide: list[jax.Array]) -> jax.Array:
            *gate, up = wide
            return activate(gate[0]) * up if gate else activate(up)

        down = whole(self.down.get_value())
        return send_to_experts(combine, x, shares, experts, self._widths(), down)


def send_to_experts(
    combine: Combine,
    x: Float[Array, "batch seq embed"],
    shares: Float[Array, "batch seq choices"],
    experts: Int[Array, "batch seq choices"],
    wide: list[jax.Array],
    down: jax.Array,
) -> Float[Array, "batch seq embed"]:
    """What the experts of each token make of it; none is lost.

    Args:
        combine: Of products with each of wide, what the product with down is given.
        x: Tokens.
        shares: Of each of a token's experts in its result.
        experts: Of each token.
        wide: Weights (experts, embed, mlp).
        down: Weights (experts, mlp, embed).
    """
    found = placement()
    run = partial(_sorted_experts, combine)
    tokens, over, inside = (
        (split_of("batch") or None, split_of("seq") or None),
        split_of("experts"),
        split_of("mlp"),
    )
    axes = {name for names in (*tokens, over, inside) if names for name in names}
    if found is None or not axes:
        return run((), (), x, shares, experts, wide, down)
    in_order = PartitionSpec(*tokens)
    by_width = PartitionSpec(over or None, None, inside or None)
    by_row = PartitionSpec(over or None, inside or None)
    return jax.shard_map(
        partial(run, over, inside),
        mesh=found.current_mesh,
        in_specs=(in_order, in_order, in_order, [by_width] * len(wide), by_row),
        out_specs=in_order,
        axis_names=axes,
        check_vma=False,
    )(x, shares, experts, wide, down)


def choose(
    scores: Float[Array, "batch seq routes"], mixture: Mixture
) -> tuple[Float[Array, "batch seq choices"], Int[Array, "batch seq choices"]]:
    """The best experts of each token, and the share of each in its result."""
    shares, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), mixture.per_token)
    if mixture.normalise:
        shares = shares / shares.sum(-1, keepdims=True)
    return shares, experts


def place_in_line(
    experts: Int[Array, "batch seq choices"], count: int
) -> Int[Array, "batch seq choices"]:
    """How many choices of the same expert precede each, in the order of its sequence."""
    chosen = jax.nn.one_hot(experts, count, dtype=jnp.int32)
    flat = chosen.reshape(len(experts), -1, count)
    before = (jnp.cumsum(flat, axis=1) - flat).reshape(chosen.shape)
    return (before * chosen).sum(-1)


def router_losses(scores: jax.Array, experts: jax.Array, mixture: Mixture, layers: int) -> Terms:
    """What keeps the experts in use and the scores small; means over tokens and layers, weighted.

    Source: Fedus et al. 2021, "Switch", equation 4, https://arxiv.org/abs/2101.03961, with the part
    of all choices as f; Zoph et al. 2022, "ST-MoE", equation 5, https://arxiv.org/abs/2202.08906
    """
    chosen = jax.nn.one_hot(experts, mixture.experts).mean((0, 1, 2))
    likely = jax.nn.softmax(scores, axis=-1).mean((0, 1))
    balance = mixture.experts * (chosen * likely).sum()
    squares = jnp.square(jax.nn.logsumexp(scores, axis=-1)).mean()
    return {
        "balance_loss": mixture.balance_loss * balance / layers,
        "router_z_loss": mixture.z_loss * squares / layers,
    }


def _sorted_experts(
    combine: Combine,
    over: tuple[str, ...],
    inside: tuple[str, ...],
    x: jax.Array,
    shares: jax.Array,
    experts: jax.Array,
    wide: list[jax.Array],
    down: jax.Array,
) -> jax.Array:
    """On one device: its experts on the tokens of all that share them.

    Args:
        combine: as in send_to_experts.
        over: mesh axes that split the experts.
        inside: mesh axes that split the width of an expert.
    """
    shape, chosen = x.shape, experts.shape[-1]
    tokens = [each.reshape(-1, each.shape[-1]) for each in (x, shares, experts)]
    if over:
        tokens = [jax.lax.all_gather(each, over, tiled=True) for each in tokens]
    x, shares, experts = tokens
    first = jax.lax.axis_index(over) * len(down) if over else 0
    mine = (experts.reshape(-1) >= first) & (experts.reshape(-1) < first + len(down))
    key = jnp.where(mine, experts.reshape(-1) - first, len(down))  # others' choices go last
    order = jnp.argsort(key, stable=True)
    # Comparisons summed: bincount would add integers up by index, which no Neuron device can.
    sizes = (key[:, None] == jnp.arange(len(down))).sum(0, dtype=jnp.int32)
    rows = jnp.take(x, order // chosen, axis=0)
    product = partial(_ragged, sizes=sizes)
    hidden = combine([checkpoint_name(product(rows, w), PROJECTION) for w in wide])
    out = checkpoint_name(product(hidden, down), PROJECTION).astype(jnp.float32)
    share = jnp.where(mine, shares.reshape(-1), 0)[order]
    total = jnp.zeros((len(x), out.shape[-1])).at[order // chosen].add(out * share[:, None])
    if inside:
        total = jax.lax.psum(total, inside)
    if over:
        total = jax.lax.psum_scatter(total, over, tiled=True)
    return total.reshape(shape).astype(x.dtype)


def _ragged(rows: jax.Array, by_expert: jax.Array, sizes: jax.Array) -> jax.Array:
    """Runs of rows, each times the matrix of its expert; rows behind the last run are zeros."""
    exact = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    out = jax.lax.ragged_dot(
        rows,
        by_expert.astype(rows.dtype),
        sizes,
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    real = jnp.arange(len(rows)) < sizes.sum()
    return jnp.where(real[:, None], out, 0).astype(rows.dtype)
