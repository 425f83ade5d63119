"""Cross-entropy over the targets that count, and DPO over pairs of answers."""

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Loss


@jax.named_scope("loss")
def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weighted sums of -log p(target) and of log(Z)^2, in float32.

    Args:
        logits: float32 (batch, seq, vocab).
        targets: int32 (batch, seq).
        weights: float32 (batch, seq); 0 masks a target.
    """
    log_z, target_logits = _scores(logits, targets)
    return ((log_z - target_logits) * weights).sum(), (log_z**2 * weights).sum()


@jax.named_scope("loss")
def log_probabilities(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Of every sequence, the weighted sum of log p(target), in float32; arguments as above."""
    log_z, target_logits = _scores(logits, targets)
    return ((target_logits - log_z) * weights).sum(-1)


@jax.named_scope("loss")
def preference(gained: jax.Array, pairs: jax.Array, loss: Loss) -> dict[str, jax.Array]:
    """Sums over pairs of DPO's loss, of the margin between rewards, and of the pairs in order.

    Args:
        gained: (batch,) log p of each answer over that of the reference; the better answer of a
            pair, then the worse.
        pairs: (batch / 2,) 1.0 for a pair, 0.0 for padding.
        loss: beta, and the part of pairs that may be labelled the wrong way round.

    Source: Rafailov et al. 2023, equation 7, https://arxiv.org/abs/2305.18290; with wrong labels:
    Mitchell 2023, "A note on DPO with noisy preferences", equation 3,
    https://ericmitchell.ai/cdpo.pdf
    """
    better, worse = gained.reshape(-1, 2).T
    margin = loss.beta * (better - worse)
    wrong = loss.label_smoothing
    losses = -(1 - wrong) * jax.nn.log_sigmoid(margin) - wrong * jax.nn.log_sigmoid(-margin)
    return {
        "loss": (losses * pairs).sum(),
        "margin": (margin * pairs).sum(),
        "accuracy": ((margin > 0) * pairs).sum(),
    }


def _scores(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log(Z) and the target's score at every position."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A comparison with iota instead of a gather: each device keeps to its part of the vocabulary.
    hit = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    return log_z, jnp.where(hit, logits, 0.0).sum(-1)
