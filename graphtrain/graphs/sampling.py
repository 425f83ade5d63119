"""Choice of the next token from logits, inside a program and without a sort.

A sort of 128,256 logits of 8 sequences takes 263 ms on two cores, and bisections of the thresholds
of top-k and top-p about 10 ms each. The random number of a token follows from the seed of its
sequence and its position, so that it does not depend on the sequences beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema.serve import STOP_TOKENS, TOP_LOG_PROBS
from lowering.tracing.constrain import constrain
from lowering.tracing.control_flow import compute_if
from lowering.tracing.current_target import traced_target
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int

_BISECTIONS = 32  # halvings of an interval of logits; float32 has no more digits
_BLOCK = 256  # tokens whose probabilities are summed first, in the search for the sampled one

_SCALARS = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "repetition_penalty": "float32",
    "presence_penalty": "float32",
    "frequency_penalty": "float32",
    "seed": "uint32",
}


def request_specs(vocab: int) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of how the tokens of one sequence are chosen.

    `stop` are the ids that end it, padded with -1; `prompt` tells which tokens are in the prompt;
    `remaining` is how many may be generated.
    """
    scalars = _SCALARS | {"remaining": "int32"}
    return {
        **{name: ArraySpec((), (), dtype, "activation") for name, dtype in scalars.items()},
        "stop": ArraySpec((STOP_TOKENS,), (None,), "int32", "activation"),
        "bias": ArraySpec((vocab,), (None,), "float32", "activation"),
        "prompt": ArraySpec((vocab,), (None,), "int32", "activation"),
    }


def choice_specs(
    shape: tuple[int, ...], axes: tuple[str | None, ...], vocab: int
) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of chosen tokens."""
    top_shape, top_axes = (*shape, min(TOP_LOG_PROBS, vocab)), (*axes, None)
    return {
        "token": ArraySpec(shape, axes, "int32", "activation"),
        "log_prob": ArraySpec(shape, axes, "float32", "activation"),
        "top": ArraySpec(top_shape, top_axes, "int32", "activation"),
        "top_log_probs": ArraySpec(top_shape, top_axes, "float32", "activation"),
    }


def choose(logits: Float[Array, "batch vocab"], sequences: Tree) -> Tree:
    """Return the next token of each sequence, its log-probability, and the most likely tokens.

    Log-probabilities are those of the model, before penalties and temperature.

    Args:
        logits: Logits, float32.
        sequences: Arrays of request_specs with a leading axis, `generated`: the number of
            occurrences of each token since the prompt, and `position` of the new token.

    Source: Keskar et al. 2019, "CTRL", section 4.1, https://arxiv.org/abs/1909.05858, for the
    repetition penalty; Holtzman et al. 2020, section 3.1, https://arxiv.org/abs/1904.09751, for
    top-p; Nguyen et al. 2024, https://arxiv.org/abs/2407.01082, for min-p
    """
    log_probs = jax.nn.log_softmax(logits)
    top_log_probs, top = jax.lax.top_k(log_probs, min(TOP_LOG_PROBS, logits.shape[1]))
    penalized = _penalize(logits, sequences)
    most_likely = likeliest(penalized)
    sampled = compute_if(
        (sequences["temperature"] > 0).any(), lambda: _sample(penalized, sequences), most_likely
    )
    token = jnp.where(sequences["temperature"] > 0, sampled, most_likely)
    return {
        "token": token,
        "log_prob": jnp.take_along_axis(log_probs, token[:, None], 1)[:, 0],
        "top": top,
        "top_log_probs": top_log_probs,
    }


def given_choice(logits: Float[Array, "seq vocab"], tokens: Int[Array, " seq"]) -> Tree:
    """Return the log-probabilities of given tokens, and the most likely ones, as `choose`."""
    log_probs = jax.nn.log_softmax(logits)
    top_log_probs, top = jax.lax.top_k(log_probs, min(TOP_LOG_PROBS, logits.shape[1]))
    return {
        "token": tokens,
        "log_prob": jnp.take_along_axis(log_probs, tokens[:, None], 1)[:, 0],
        "top": top,
        "top_log_probs": top_log_probs,
    }


def _penalize(logits: jax.Array, sequences: Tree) -> jax.Array:
    """Return logits with penalties and biases."""
    generated = sequences["generated"]
    occurred = (generated + sequences["prompt"]) > 0
    penalty = sequences["repetition_penalty"][:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(occurred, repeated, logits)
    logits = logits - sequences["presence_penalty"][:, None] * (generated > 0)
    logits = logits - sequences["frequency_penalty"][:, None] * generated
    return logits + sequences["bias"]


def _sample(logits: jax.Array, sequences: Tree) -> Int[Array, " batch"]:
    """Return a token of each sequence, by temperature, top-k, top-p and min-p, in this order."""
    temperature = jnp.maximum(sequences["temperature"], 1e-6)[:, None]
    scaled = logits / temperature
    scaled = scaled - scaled.max(-1, keepdims=True)
    vocab = logits.shape[1]
    top_k = jnp.where(sequences["top_k"] > 0, sequences["top_k"], vocab)
    kept = compute_if((sequences["top_k"] > 0).any(), lambda: _keep_top_k(scaled, top_k), scaled)
    top_p = sequences["top_p"]
    kept = compute_if((top_p < 1).any(), lambda: _keep_top_p(kept, top_p), kept)
    least = jnp.log(sequences["min_p"])[:, None]  # of the most likely one, whose logit is 0
    return _draw(jnp.where(kept >= least, kept, -jnp.inf), _uniform(sequences))


def likeliest(logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """Return the first token with the largest logit of each row.

    Neuron's compiler refuses `argmax`, which reduces two arrays at once.
    """
    vocab = logits.shape[1]
    is_largest = logits == logits.max(-1, keepdims=True)
    return jnp.where(is_largest, jnp.arange(vocab, dtype=jnp.int32), vocab).min(-1)


def _keep_top_k(
    logits: Float[Array, "batch vocab"], count: Int[Array, " batch"]
) -> Float[Array, "batch vocab"]:
    """Mask all but the `count` largest logits of each row; ties with the smallest one stay."""
    return _keep_above(logits, lambda threshold: (logits >= threshold).sum(-1) >= count)


def _keep_top_p(
    logits: Float[Array, "batch vocab"], share: Float[Array, " batch"]
) -> Float[Array, "batch vocab"]:
    """Mask all but the most likely tokens whose probabilities sum to `share`, at least one."""
    weights = jnp.exp(logits)
    needed = share * weights.sum(-1)
    kept = _keep_above(
        logits, lambda threshold: jnp.where(logits >= threshold, weights, 0).sum(-1) >= needed
    )
    return jnp.where((share < 1)[:, None], kept, logits)


def _keep_above(
    logits: Float[Array, "batch vocab"],
    is_enough: Callable[[jax.Array], Bool[Array, " batch"]],
) -> Float[Array, "batch vocab"]:
    """Mask the logits below the largest threshold that keeps enough of them, by bisection.

    Args:
        logits: Logits of which the largest is 0.
        is_enough: Function of thresholds (batch, 1).
    """
    finite = jnp.where(jnp.isfinite(logits), logits, 0.0)
    low = finite.min(-1, keepdims=True) - 1
    high = jnp.zeros_like(low)

    def halve(_: int, interval: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = interval
        middle = (low + high) / 2
        enough = is_enough(middle)[:, None]
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, high = jax.lax.fori_loop(0, _BISECTIONS, halve, (low, high))
    threshold = jnp.where(is_enough(high)[:, None], high, low)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _uniform(sequences: Tree) -> Float[Array, " batch"]:
    """Return a number in [0, 1) for each sequence, which follows from its seed and position."""
    target = traced_target()
    generator = (target and target.random_bits) or "threefry2x32"

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl=generator), position)
        return jax.random.uniform(key)

    seeds, positions = sequences["seed"], sequences["position"]
    if generator == "threefry2x32":
        return jax.vmap(draw)(seeds, positions)
    # A batch of other keys draws all of its numbers from the first one.
    return jax.lax.map(lambda row: draw(*row), (seeds, positions))


def _draw(
    logits: Float[Array, "batch vocab"], uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
    """Return the token at a fraction of the cumulative distribution of each row.

    Sums over blocks come first: a cumulative sum over the whole vocabulary is slow.
    """
    weights = jnp.exp(logits)
    batch, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(batch, -1, _BLOCK)
    # On every device whole: a running sum over shards is slow, and Ascend has none.
    sums = jnp.cumsum(constrain(blocks.sum(-1), None, None), -1)
    wanted = uniform * sums[:, -1]
    block = jnp.minimum((sums <= wanted[:, None]).sum(-1), sums.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(sums, block[:, None] - 1, 1)[:, 0], 0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    index = (jnp.cumsum(inside, -1) <= (wanted - before)[:, None]).sum(-1)
    # Rounding may lead past the last token that has a probability.
    last = jnp.where(inside > 0, jnp.arange(_BLOCK), 0).max(-1)
    return (block * _BLOCK + jnp.minimum(index, last)).astype(jnp.int32)
