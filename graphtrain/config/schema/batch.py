"""[program.batch]: the sequences of a training step."""

from typing import Literal

from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Count


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Batch:
    """The global batch of one training step."""

    global_batch_size: Count  # sequences per step, over all devices and microbatches
    seq_len: Count  # tokens per sequence
    microbatches: Count = 1  # gradient accumulation steps, or microbatches of a pipeline
    # per_microbatch: over data-parallel replicas after every microbatch. per_step: once a step.
    gradient_reduction: Literal["per_microbatch", "per_step"] = "per_microbatch"  # when to reduce
    cross_document_attention: bool = True  # false: no attention across packed documents

    def __post_init__(self) -> None:
        if self.global_batch_size % self.microbatches:
            raise ValueError(
                f"global_batch_size = {self.global_batch_size} is not a multiple of "
                f"microbatches = {self.microbatches}"
            )

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch_size * self.seq_len
