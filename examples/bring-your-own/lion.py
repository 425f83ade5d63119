# Lion in place of AdamW: [program.optimizer] custom = "examples/bring-your-own/lion.py:lion".
# The updates must not be multiplied by the learning rate, which is an input of the step.

import optax


def lion(beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.1):
    return optax.chain(
        optax.scale_by_lion(beta1, beta2),
        optax.add_decayed_weights(weight_decay),
    )
