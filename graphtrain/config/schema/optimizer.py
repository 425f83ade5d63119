"""[program.optimizer]: AdamW."""

from typing import Literal

from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Fraction, NotNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optimizer:
    """AdamW. The learning rate is an input of the step, set under [run.learning_rate].

    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101
    """

    beta1: Fraction = 0.9  # decay rate of the first moment
    beta2: Fraction = 0.95  # decay rate of the second moment
    epsilon: PositiveFloat = 1e-8  # added to the root of the second moment
    weight_decay: NotNegativeFloat = 0.1  # multiplied by the learning rate
    decay_mask: Literal["matrices", "all"] = "matrices"  # decayed weights; not norms and biases
    clip_norm: NotNegativeFloat = 1.0  # maximum global norm of the gradients; 0: no clipping
    offload_to_host: bool = False  # keep the moments in host memory, if the target supports it
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of the first moment
