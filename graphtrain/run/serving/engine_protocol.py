"""Interface of an engine: a model on its devices that continues sequences, each in a slot.

The scheduler decides which request is in which slot; the engine computes. Its methods block, and
are called from one thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Protocol

from graphtrain.errors import GraphtrainError, TrainingError

_REALS = {"temperature", "top_p"}


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """Settings that choose the tokens of one sequence.

    A token depends on these, the tokens before it and the seed; not on the sequences beside it.
    """

    temperature: float = 1.0  # divisor of the logits; 0: always the most likely token
    top_k: int = 0  # number of most likely tokens to sample from; 0: all
    top_p: float = 1.0  # total probability of the tokens to sample from
    min_p: float = 0.0  # least probability, as a fraction of that of the most likely token
    repetition_penalty: float = 1.0  # divides positive logits of tokens that occurred (CTRL)
    presence_penalty: float = 0.0  # subtracted from logits of generated tokens (OpenAI)
    frequency_penalty: float = 0.0  # the same, times the number of their occurrences
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added, by token id
    seed: int = 0
    max_tokens: int = 16  # tokens to generate, at most
    stop_tokens: Sequence[int] = ()  # ids that end the sequence; the last token generated

    def __post_init__(self) -> None:
        """Check the ranges; the comparisons are written so that NaN fails them.

        Raises:
            GraphtrainError: a value is no number, or outside of its range.
        """
        for name in ("temperature", "top_p", "top_k", "seed", "max_tokens"):
            value = getattr(self, name)
            kind, words = (Real, "number") if name in _REALS else (Integral, "whole number")
            if not isinstance(value, kind):
                raise GraphtrainError(f"{name} = {value!r}: must be a {words}")
        ranges = {
            "temperature": (0 <= self.temperature < math.inf, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "finite"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "finite"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
        }
        for name, (is_right, expected) in ranges.items():
            if not is_right:
                raise GraphtrainError(f"{name} = {getattr(self, name)}: must be {expected}")


@dataclass(frozen=True)
class TokenChoice:
    """A token that was generated, or given, with its probability and the alternatives."""

    token: int
    log_prob: float  # of the token by the model, before temperature and penalties
    # (id, log-probability) of the most likely tokens, schema.serve.TOP_LOG_PROBS of them
    top: tuple[tuple[int, float], ...] = ()


class SlotErrors(TrainingError):
    """Sequences of some slots cannot be continued; they ended, and the others went on.

    Args:
        errors: Why, by slot.
        choices: New tokens of all slots, as `decode` returns them.
    """

    def __init__(
        self, errors: Mapping[int, TrainingError], choices: Sequence[list[TokenChoice]]
    ) -> None:
        super().__init__(str(next(iter(errors.values()))))
        self.errors, self.choices = errors, choices


class Engine(Protocol):
    """Model with `slots` sequences of at most `context_length` tokens each."""

    @property
    def slots(self) -> int:
        """Number of sequences that are generated at the same time."""
        ...

    @property
    def context_length(self) -> int:
        """Number of tokens of a sequence, prompt included, at most."""
        ...

    @property
    def chunk(self) -> int:
        """Number of tokens that one call of prefill processes, at most."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the LoRA adapters that a sequence may use."""
        ...

    @property
    def vocab(self) -> int:
        """Number of tokens of the model that may be generated."""
        ...

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        offset: int,
        sampling: SamplingParameters | None = None,
        *,
        prompt: Sequence[int] = (),
        adapter: str | None = None,
    ) -> TokenChoice | None:
        """Process tokens of a prompt into the KV cache of a slot, at positions from `offset`.

        What the slot holds before `offset` stays; prefixes are reused in this way.

        Args:
            slot: Slot of the sequence; its decoding ends if it was active.
            tokens: At most `chunk` tokens.
            offset: Position of the first of them.
            sampling: Given with the last tokens of a prompt: choose the first new token, return
                it, and let `decode` continue the slot, unless the sequence is complete.
            prompt: All tokens of the prompt, which the repetition penalty counts.
            adapter: LoRA adapter of the sequence, the same in all calls; None: the base.
        """
        ...

    def decode(self) -> list[list[TokenChoice]]:
        """Generate the next tokens of all active slots; return them by slot.

        One call generates up to a fixed number of tokens for each slot, fewer where a sequence
        ends: by a stop token (which is returned), max_tokens, or the end of the context. A slot
        whose sequence ended is no longer active.

        Raises:
            SlotErrors: the sequences of some slots cannot be continued.
        """
        ...

    def release(self, slot: int) -> None:
        """End the decoding of a slot. Its KV cache stays until another prefill overwrites it."""
        ...

    def can_reuse(self, slot: int, length: int) -> bool:
        """Return whether a sequence can continue the first `length` tokens that a slot held.

        Layers with a sliding window may have overwritten what it would see of them.
        """
        ...

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of a slot's KV cache, if `can_reuse`, to another."""
        ...

    def score(
        self, tokens: Sequence[int], *, adapter: str | None = None
    ) -> list[TokenChoice | None]:
        """Return the log-probability of tokens given those before them; None for the first.

        Args:
            tokens: At most `context_length` + 1 tokens.
            adapter: LoRA adapter that scores; None: the base.
        """
        ...

    def is_active(self, slot: int) -> bool:
        """Return whether `decode` continues a slot."""
        ...
