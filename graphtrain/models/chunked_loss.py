"""Head and cross-entropy, a chunk of positions at a time: not all logits exist at once.

The loss is where a step ends, so the gradient of a chunk's logits is known as soon as they are:
softmax less one-hot, by weight. The same loop makes of it the gradients of hidden values and of the
head, which wait for the backward pass; no product is computed twice.

Positions that lie on different devices are dimensions of their own, "piece" below, as long as the
rules split them. Each device then adds up the head's gradient, and the loss, of its own pieces, and
what it found travels once, after the loop.

Source: Wijmans et al. 2024, "Cut your losses", https://arxiv.org/abs/2411.09009, for the problem;
Hsu et al. 2024, "Liger kernel", section 3.2, https://arxiv.org/abs/2410.10989, for gradients that
are made in the forward pass
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from graphtrain.models.attention.score_mods import cap
from graphtrain.models.chunk_size import check_chunk
from graphtrain.models.loss import hits, target_scores
from graphtrain.models.matmul import dot
from lowering.tracing.constrain import constrain, placement, size_of, split_of
from lowering.tracing.cpu_hints import computed_once
from lowering.tracing.deferred_gradient import vary
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import layout

_TOKENS = ("batch", None, "seq", None)  # pieces of a batch, sequences, pieces of them, positions
_HERE = (1, 3)  # dimensions of those that lie on one device


@dataclass(frozen=True)
class Scored:
    """How hidden values become scores, and scores a loss."""

    chunk: int  # positions of a sequence
    tied: bool  # the head is (vocab, embed), else (embed, vocab)
    cap: float | None  # of scores
    z_loss: float

    @property
    def head_axes(self) -> tuple[str, str]:
        return ("vocab", "embed") if self.tied else ("embed", "vocab")

    @property
    def letters(self) -> str:
        return "ve" if self.tied else "ev"


@jax.named_scope("loss")
def chunked_cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, scored: Scored
) -> tuple[jax.Array, jax.Array]:
    """Weighted sums of what is minimised, z-loss and all, and of -log p(target), in float32.

    Only the first has a gradient.

    Args:
        hidden: (batch, seq, embed).
        head: its weights.
        targets: int32 (batch, seq).
        weights: float32 (batch, seq); 0 masks a target.
        scored: the rest.

    Raises:
        ShardingError: as check_chunk.
    """
    both: Any = _losses(scored, hidden, head, targets, weights)
    value, loss = both
    return value, jax.lax.stop_gradient(loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(scored: Scored, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _over_chunks(scored, *arrays, differentiate=False)[0]


def _losses_forward(scored: Scored, *arrays: jax.Array) -> Any:
    return _over_chunks(scored, *arrays, differentiate=True)


def _losses_backward(scored: Scored, gradients: Any, of: tuple[jax.Array, jax.Array]) -> Any:
    of_hidden, of_head = gradients
    return (of_hidden * of[0]).astype(of_hidden.dtype), of_head * of[0], None, None


_losses.defvjp(_losses_forward, _losses_backward)


def _over_chunks(
    scored: Scored,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    differentiate: bool,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array] | None]:
    """Both losses, and the gradients of the first by hidden values and head."""
    tokens = [_in_pieces(x) for x in (hidden, targets, weights)]
    length = tokens[0].shape[3]
    check_chunk(scored.chunk, length)
    # In the dtype of the products, and whole over embed, before the loop: gathered once.
    head_used = constrain(head.astype(hidden.dtype), *scored.head_axes)
    pieces = tokens[0].shape[0], tokens[0].shape[2]
    sums = (_zeros(pieces, "batch", "seq"),) * 2
    gradients = None
    if differentiate:
        of_head = _zeros((*pieces, *head.shape), "batch", "seq", *scored.head_axes)
        gradients = jnp.zeros_like(tokens[0]), of_head

    def add(carried: Any, index: jax.Array) -> tuple[Any, None]:
        sums, gradients = carried
        begin = index * scored.chunk
        chunk = [jax.lax.dynamic_slice_in_dim(x, begin, scored.chunk, 3) for x in tokens]
        found, of_scores = _scored(scored, chunk, head_used, differentiate)
        sums = jax.tree.map(jnp.add, sums, found)
        if gradients is None or of_scores is None:
            return (sums, None), None
        of_hidden, of_head = gradients
        here, more = _products(scored, chunk[0], head_used, of_scores)
        of_hidden = jax.lax.dynamic_update_slice_in_dim(of_hidden, here, begin, 3)
        return (sums, (of_hidden, of_head + more)), None

    turns = jnp.arange(length // scored.chunk)
    (sums, gradients), _ = jax.lax.scan(add, (sums, gradients), turns)
    value, loss = (x.sum() for x in sums)
    if gradients is None:
        return (value, loss), None
    of_hidden, of_head = gradients
    return (value, loss), (
        constrain(of_hidden.reshape(hidden.shape), "batch", "seq", "embed"),
        _joined(of_head, scored.head_axes).astype(head.dtype),
    )


def _in_pieces(x: jax.Array) -> jax.Array:
    """(batch, seq, ...) to (piece, batch, piece, seq, ...)."""
    batch, seq = size_of("batch"), size_of("seq")
    rest = x.shape[2:]
    divided = x.reshape(batch, x.shape[0] // batch, seq, x.shape[1] // seq, *rest)
    return constrain(divided, *_TOKENS, *("embed" for _ in rest))


def _joined(of_head: jax.Array, axes: tuple[str, str]) -> jax.Array:
    """The sum over pieces: first over the mesh axes that hold a part of the head each, so that XLA
    reduces and scatters there, and adds up only parts over the others."""
    found, names = placement(), (*split_of("batch"), *split_of("seq"))
    if found is None or not names:
        return of_head.sum((0, 1))
    shape = of_head.shape[2:]
    sizes = [found.shape.axes[name] for name in names]
    rest = layout("head", ArraySpec(shape, axes, role="optimizer"), found.rules, found.shape).split
    holding = [name for name in names if any(name in held for held in rest)]
    others = [name for name in names if name not in holding]
    parts = of_head.reshape(*sizes, *shape).sum(tuple(map(names.index, holding)))
    split = PartitionSpec(*others, *(held or None for held in rest))
    placed = NamedSharding(found.current_mesh, split)
    return jax.lax.with_sharding_constraint(parts, placed).sum(tuple(range(len(others))))


def _zeros(shape: tuple[int, ...], *axes: str) -> jax.Array:
    """In float32; a device's own, where code is traced by hand."""
    found, zeros = placement(), jnp.zeros(shape, jnp.float32)
    for mesh_axis in found.manual if found else ():
        zeros = vary(zeros, mesh_axis)
    return constrain(zeros, *axes)


def _scored(
    scored: Scored, chunk: list[jax.Array], head: jax.Array, differentiate: bool
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """Of a chunk both losses, by piece, and the gradient of the first by the head's products."""
    hidden, targets, weights = chunk
    with jax.named_scope("head"):
        products = dot(f"nbcse,{scored.letters}->nbcsv", hidden, head, jnp.float32)
        scores = constrain(cap(products, scored.cap), *_TOKENS, "vocab")
    highest = scores.max(-1)
    powers = computed_once(jnp.exp(scores - highest[..., None]))
    total = powers.sum(-1)
    log_z = jnp.log(total) + highest
    losses = log_z - target_scores(scores, targets)
    values = losses + scored.z_loss * log_z**2
    sums = (values * weights).sum(_HERE), (losses * weights).sum(_HERE)
    if not differentiate:
        return sums, None
    of_log_z = weights * (1 + 2 * scored.z_loss * log_z) / total
    hit = jnp.where(hits(scores, targets), weights[..., None], 0.0)
    of_scores = powers * of_log_z[..., None] - hit
    if scored.cap is not None:
        of_scores = of_scores * (1 - jnp.square(scores / scored.cap))
    return sums, computed_once(of_scores.astype(hidden.dtype))


@jax.named_scope("head")
def _products(
    scored: Scored, hidden: jax.Array, head: jax.Array, of_scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of a chunk's hidden values, and of the head by piece, in float32."""
    letters = scored.letters
    of_hidden = dot(f"nbcsv,{letters}->nbcse", of_scores, head)
    return of_hidden, dot(f"nbcse,nbcsv->nc{letters}", hidden, of_scores, jnp.float32)
