# A focal loss: [program.loss] custom = "examples/bring-your-own/focal.py:focal".
# It returns the loss of each token, (batch, seq); graphtrain weighs them by the loss mask.
# Source: Lin et al. 2017, equation 4, https://arxiv.org/abs/1708.02002

import jax
import jax.numpy as jnp


def focal(logits: jax.Array, targets: jax.Array, gamma: float = 2.0) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits)  # (batch, seq, vocab)
    log_prob = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    return -((1 - jnp.exp(log_prob)) ** gamma) * log_prob
