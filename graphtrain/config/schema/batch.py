"""[program.batch]: the sequences of a training step."""

from typing import Literal

from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Count, NotNegative


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Batch:
    """The global batch of one training step."""

    global_batch_size: Count  # sequences per step, over all devices and microbatches
    seq_len: Count  # tokens per sequence
    microbatches: Count = 1  # gradient accumulation steps, or microbatches of a pipeline
    # per_microbatch: over data-parallel replicas after every microbatch. per_step: once a step.
    gradient_reduction: Literal["per_microbatch", "per_step"] = "per_microbatch"  # when to reduce
    cross_document_attention: bool = True  # false: no attention across packed documents
    # They have no weight in the loss; with run.fallback, they are chosen for fewer hosts.
    padding_sequences: NotNegative = 0  # empty sequences after those of a step, to fill the mesh

    def __post_init__(self) -> None:
        if self.rows % self.microbatches:
            padded = f" + padding_sequences = {self.padding_sequences}" * bool(
                self.padding_sequences
            )
            raise ValueError(
                f"global_batch_size = {self.global_batch_size}{padded} is not a multiple of "
                f"microbatches = {self.microbatches}"
            )
        if (self.microbatches - 1) * self.microbatch_rows >= self.global_batch_size:
            raise ValueError(
                f"padding_sequences = {self.padding_sequences} would fill a whole microbatch; use "
                f"less than {self.microbatch_rows}"
            )

    @property
    def rows(self) -> int:
        """Sequences that a step computes, with those that only fill the mesh."""
        return self.global_batch_size + self.padding_sequences

    @property
    def microbatch_rows(self) -> int:
        """Sequences that one microbatch computes."""
        return self.rows // self.microbatches

    @property
    def tokens(self) -> int:
        """Tokens per step, without those of padding."""
        return self.global_batch_size * self.seq_len
