"""[program.loss]: cross-entropy, DPO, or a loss of the user."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import (
    STRICT,
    NotNegativeFloat,
    Plain,
    Positive,
    PositiveFloat,
)
from graphtrain.config.user_code import UserCode

_EMPTY: Any = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Loss:
    """Cross-entropy over the tokens of the loss mask, or DPO over pairs of answers.

    Source: Rafailov et al. 2023, "Direct preference optimization", https://arxiv.org/abs/2305.18290
    """

    kind: Literal["cross_entropy", "dpo"] = "cross_entropy"  # dpo: rows are preference pairs
    z_loss: NotNegativeFloat = 0.0  # weight of log(Z)^2; PaLM (arxiv.org/abs/2204.02311): 1e-4
    # auto: chunks on GPUs and TPUs if they save much memory for little time. none: no chunks.
    chunk: Positive | Literal["auto", "none"] = "auto"  # tokens per chunk of logits of a sequence
    beta: PositiveFloat = 0.1  # dpo: strength of the penalty for diverging from the reference
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # dpo: share of wrong labels
    custom: str | None = None  # "file.py:name", the loss of each token, in place of cross-entropy
    arguments: dict[str, Plain] = _EMPTY  # arguments of custom

    def __post_init__(self) -> None:
        if self.kind == "dpo" and self.z_loss:
            raise ValueError('z_loss is only for kind = "cross_entropy"; remove it')
        if self.kind == "dpo" and self.has_chunks:
            raise ValueError('chunk is only for kind = "cross_entropy"; remove it')
        if self.kind != "dpo" and (names := self._set_of_dpo):
            raise ValueError(f'{" and ".join(names)} is only for kind = "dpo"; remove it')
        refused = {'kind = "dpo"': self.kind == "dpo", "z_loss": self.z_loss,
                   "chunk": self.has_chunks}  # fmt: skip
        if self.custom and (names := [name for name, is_set in refused.items() if is_set]):
            raise ValueError(f"{' and '.join(names)} cannot be used with custom; remove it")
        if self.arguments and not self.custom:
            raise ValueError("arguments are those of custom; set custom too")

    def __hash__(self) -> int:
        return hash(repr(self))  # dictionaries are not hashable

    @property
    def user_code(self) -> UserCode | None:
        """Return the loss of the user, if there is one."""
        if self.custom is None:
            return None
        return UserCode("program.loss.custom", "graphtrain.losses", self.custom)

    @property
    def _set_of_dpo(self) -> list[str]:
        """Names of the settings of DPO that are not at their defaults."""
        defaults = {"beta": Loss.beta, "label_smoothing": Loss.label_smoothing}
        return [name for name, default in defaults.items() if getattr(self, name) != default]

    @property
    def has_chunks(self) -> bool:
        """Return whether a chunk length is set."""
        return isinstance(self.chunk, int)
