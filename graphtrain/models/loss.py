"""Cross-entropy over targets of nonzero weight, and DPO over pairs of answers."""

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Loss
from lowering.tracing.constrain import mesh_axes_of
from lowering.tracing.cpu_hints import materialize, on_cpu


@jax.named_scope("loss")
def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sums of -log p(target) and of log(Z)^2, in float32.

    Args:
        logits: float32 (batch, seq, vocab).
        targets: int32 (batch, seq).
        weights: float32 (batch, seq); 0 masks a target.

    Source: z-loss: Chowdhery et al. 2022, "PaLM", section 5, https://arxiv.org/abs/2204.02311
    """
    log_z, target_logits = _scores(logits, targets)
    return ((log_z - target_logits) * weights).sum(), (log_z**2 * weights).sum()


@jax.named_scope("loss")
def log_probabilities(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Return each sequence's weighted sum of log p(target), float32 (batch,).

    Arguments are those of cross_entropy.
    """
    log_z, target_logits = _scores(logits, targets)
    return ((target_logits - log_z) * weights).sum(-1)


@jax.named_scope("loss")
def dpo_loss(log_ratio: jax.Array, pairs: jax.Array, loss: Loss) -> dict[str, jax.Array]:
    """Return sums over pairs of DPO's loss, the reward margin, and pairs ranked correctly.

    Args:
        log_ratio: (batch,) log p of each answer minus that of the reference model; the chosen
        answer
            of a pair, then the rejected one.
        pairs: (batch / 2,) 1.0 for a pair, 0.0 for padding.
        loss: beta, and label_smoothing, the assumed fraction of pairs with swapped labels.

    Source: Rafailov et al. 2023, equation 7, https://arxiv.org/abs/2305.18290; with wrong labels:
    Mitchell 2023, "A note on DPO with noisy preferences", equation 3,
    https://ericmitchell.ai/cdpo.pdf
    """
    chosen, rejected = log_ratio.reshape(-1, 2).T
    margin = loss.beta * (chosen - rejected)
    flip_rate = loss.label_smoothing
    losses = -(1 - flip_rate) * jax.nn.log_sigmoid(margin) - flip_rate * jax.nn.log_sigmoid(-margin)
    return {
        "loss": (losses * pairs).sum(),
        "margin": (margin * pairs).sum(),
        "accuracy": ((margin > 0) * pairs).sum(),
    }


def _scores(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return log(Z) and the target's logit at every position."""
    if on_cpu() and not mesh_axes_of("vocab"):
        return _scores_unsharded(logits, targets)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return log_z, target_scores(logits, targets)


def target_scores(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the logits of targets (...) among logits (..., vocab); 0 outside of the vocabulary."""
    if on_cpu() and not mesh_axes_of("vocab"):
        in_vocab = (targets >= 0) & (targets < logits.shape[-1])
        gathered = jnp.take_along_axis(logits, targets[..., None], -1, mode="clip")[..., 0]
        return jnp.where(in_vocab, gathered, 0.0)
    # A comparison with iota instead of a gather: each device compares with its shard of the
    # vocabulary. The barrier stops JAX from hoisting iota and zeros, each of the logits' shape, out
    # of a loop over microbatches.
    vocab_ids = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    vocab_ids, zero, targets = jax.lax.optimization_barrier((vocab_ids, jnp.zeros(()), targets))
    return jnp.where(vocab_ids == targets[..., None], logits, zero).sum(-1)


def one_hot_mask(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return which of the logits (..., vocab) belong to targets (...), as bool (..., vocab)."""
    last = logits.ndim - 1
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, last) == targets[..., None]


@jax.custom_vjp
def _scores_unsharded(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute _scores where each device has the complete vocabulary.

    With JAX's own gradient, XLA:CPU would write that of the target logits, nearly all zeros, as one
    more array of the logits' size, and read it again.
    """
    return _looked_up_forward(logits, targets)[0]


def _looked_up_forward(
    logits: jax.Array, targets: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    highest = logits.max(-1)
    powers = materialize(jnp.exp(logits - highest[..., None]))
    total = powers.sum(-1)
    scores = jnp.log(total) + highest, target_scores(logits, targets)
    return scores, (powers, total, targets)


def _looked_up_backward(
    residuals: tuple[jax.Array, jax.Array, jax.Array], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    powers, total, targets = residuals
    grad_log_z, grad_score = gradients
    grad_scale = materialize(grad_log_z / total)[..., None]
    grad_at_target = jnp.where(one_hot_mask(powers, targets), grad_score[..., None], 0.0)
    return powers * grad_scale + grad_at_target, None


_scores_unsharded.defvjp(_looked_up_forward, _looked_up_backward)
