"""[program.serve]: generation and serving with the weights of a run."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Count, NotNegative, Positive

TOP_LOG_PROBS = 20  # most likely tokens that are reported beside a chosen one, at most
STOP_TOKENS = 8  # ids that end a sequence, at most


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Serve:
    """Programs that continue sequences, each in a slot of a KV cache."""

    slots: Count = 8  # sequences that are generated at the same time, over all devices
    context_length: Positive | None = None  # tokens of a sequence; unset: program.batch.seq_len
    # A prompt is processed in the chunks of these sizes that take the least time; the last one is
    # padded. Each size is one compiled program, and for serving two.
    prefill: tuple[Count, ...] = (32, 64, 128, 320, 512)  # tokens of a call
    beams: NotNegative = 0  # of a beam search; 0: none is compiled. --beams sets it
    tokens_per_call: Count = 4  # tokens that a call of the decode program generates for a slot
    # `graphtrain serve --adapter` loads LoRA adapters beside the base; requests choose by name.
    total_adapter_rank: NotNegative = 0  # ranks of all LoRA adapters together, at most; 0: none
    adapter_target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "*",
    )  # matrices that LoRA adapters may have factors of: names, globs
    # auto: float32 on CPUs, whose attention is fastest in it, and precision.compute elsewhere.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations and KV cache
    # auto: dtype if that is set, else precision.compute; on CPUs dtype for imported ones, experts.
    # int8: matrices of the native decoder, but for embeddings and experts; rounds.
    weights_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"  # of matrices

    def __post_init__(self) -> None:
        if not self.prefill:
            raise ValueError(
                f"prefill = []: name at least one size; the default is {list(type(self).prefill)}"
            )
        if list(self.prefill) != sorted(set(self.prefill)):
            raise ValueError(f"prefill = {list(self.prefill)}: sizes must increase")
        if self.beams == 1:
            raise ValueError("beams = 1: a beam search has at least 2 (0: no beam search)")
