"""[program.loss]: cross-entropy or DPO."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, NotNegativeFloat, Positive, PositiveFloat


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

    def __post_init__(self) -> None:
        if self.kind == "dpo" and self.z_loss:
            raise ValueError('z_loss is only for kind = "cross_entropy"; remove it')
        if self.kind == "dpo" and self.has_chunks:
            raise ValueError('chunk is only for kind = "cross_entropy"; remove it')

    @property
    def has_chunks(self) -> bool:
        """Return whether a chunk length is set."""
        return isinstance(self.chunk, int)
