"""[program.optimizer]: AdamW, or an optimizer of the user."""

from dataclasses import fields
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import (
    STRICT,
    Fraction,
    NotNegativeFloat,
    Plain,
    PositiveFloat,
)
from graphtrain.config.user_code import UserCode

_OF_ADAMW = ("beta1", "beta2", "epsilon", "weight_decay", "decay_mask", "moment_dtype")
_EMPTY: Any = Field(default_factory=dict)


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
    custom: str | None = None  # "file.py:name" that makes an optax optimizer, in place of AdamW
    arguments: dict[str, Plain] = _EMPTY  # arguments of custom

    def __post_init__(self) -> None:
        if self.custom is None:
            if self.arguments:
                raise ValueError("arguments are those of custom; set custom too")
            return
        defaults = {field.name: field.default for field in fields(self)}
        unused = [name for name in _OF_ADAMW if getattr(self, name) != defaults[name]]
        if unused:
            raise ValueError(
                f"{', '.join(unused)} is only for AdamW; with custom, pass it in arguments"
            )

    def __hash__(self) -> int:
        return hash(repr(self))  # dictionaries are not hashable

    @property
    def user_code(self) -> UserCode | None:
        """Return the optimizer of the user, if there is one."""
        if self.custom is None:
            return None
        return UserCode("program.optimizer.custom", "graphtrain.optimizers", self.custom)
