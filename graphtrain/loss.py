"""Cross-entropy over the targets that count."""

import jax
import jax.numpy as jnp


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
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A comparison with iota instead of a gather: each device keeps to its part of the vocabulary.
    hit = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    target_logits = jnp.where(hit, logits, 0.0).sum(-1)
    return ((log_z - target_logits) * weights).sum(), (log_z**2 * weights).sum()
