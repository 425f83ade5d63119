"""Loss of a microbatch from its logits: cross-entropy, or the user's loss of each token."""

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Loss
from graphtrain.errors import ConfigError
from graphtrain.models.loss import cross_entropy


def weighted_loss(
    loss: Loss, logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the objective, which includes the z-loss, and the loss; both summed over targets.

    Args:
        loss: Settings.
        logits: float32 (batch, seq, vocab).
        targets: int32 (batch, seq).
        weights: float32 (batch, seq); 0 masks a target.

    Raises:
        ConfigError: the user's loss raised an exception, or is not the loss of each token.
    """
    code = loss.user_code
    if code is None:
        value, squares = cross_entropy(logits, targets, weights)
        return value + loss.z_loss * squares, value
    losses = code.call(logits, targets, **loss.arguments)
    if getattr(losses, "shape", None) != targets.shape:
        raise ConfigError(
            f"{code} returned {getattr(losses, 'shape', type(losses).__name__)}; it must return "
            f"the loss of each token, an array of shape {targets.shape}"
        )
    total = (jnp.where(weights != 0, losses, 0).astype(jnp.float32) * weights).sum()
    return total, total
