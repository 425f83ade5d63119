"""A sequence to generate: what is asked, and its text as tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graphtrain.run.serving.detokenizer import Decode, IncrementalDetokenizer
from graphtrain.run.serving.engine_protocol import SamplingParameters, TokenChoice
from graphtrain.run.serving.stop_strings import StopStrings

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SequenceRequest:
    """A prompt and how to continue it."""

    prompt: tuple[int, ...]  # token ids, at least one
    sampling: SamplingParameters
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    adapter: str | None = None  # name of a LoRA adapter; None: the base


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """A text whose tokens are given a log-probability each."""

    prompt: tuple[int, ...]  # token ids, at least one
    adapter: str | None = None  # name of a LoRA adapter; None: the base


@dataclass(frozen=True)
class TextToken:
    """A generated token and where its text begins."""

    choice: TokenChoice
    offset: int  # characters of the generated text before it
    cut_text: str | None = None  # its text up to a stop string that begins inside; None: all of it


def mean_log_prob(tokens: Sequence[TextToken]) -> float:
    """Return the mean log-probability of generated tokens, by which samples are ranked."""
    return sum(token.choice.log_prob for token in tokens) / max(1, len(tokens))


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens and times of a sequence that ended."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, whose KV cache was reused
    generated_tokens: int  # with the stop token, if there was one
    queue_seconds: float  # until the sequence got a slot
    first_token_seconds: float  # from the submission
    seconds: float  # from the submission


@dataclass(frozen=True, kw_only=True)
class Update:
    """Progress of one sequence of a request."""

    index: int  # of the sequence in its request
    text: str = ""  # that follows the text of the updates before
    tokens: tuple[TextToken, ...] = ()  # whose text ends in the text so far
    stop_token: TextToken | None = None  # that ended the sequence, and is not in its text
    scores: tuple[TokenChoice | None, ...] = ()  # answer to a ScoreRequest
    finish_reason: FinishReason | None = None
    usage: Usage | None = None  # with the last update
    error: Exception | None = None  # the sequence failed; the last update

    @property
    def is_last(self) -> bool:
        return self.usage is not None or self.error is not None


@dataclass(frozen=True)
class _HeldToken:
    """Token whose text is not released to its end."""

    token: TextToken
    text: str

    @property
    def end(self) -> int:
        return self.token.offset + len(self.text)

    def cut(self, end: int) -> TextToken:
        """Return the token of a text that ends here, perhaps inside of the token."""
        if self.end <= end:
            return self.token
        return replace(self.token, cut_text=self.text[: end - self.token.offset])


class GeneratedText:
    """Text of the generated tokens of one sequence.

    Args:
        request: The sequence.
        decode: Decoder of the tokenizer.
    """

    def __init__(self, request: SequenceRequest, decode: Decode) -> None:
        self._stop_tokens = frozenset(request.sampling.stop_tokens)
        self._detokenizer = IncrementalDetokenizer(decode, request.prompt)
        self._stop_strings = StopStrings(request.stop)
        self._decoded = self._released = 0  # characters
        self._held: list[_HeldToken] = []
        self._is_cut = False  # by a stop string
        self.is_stopped = False
        self.stop_token: TextToken | None = None

    def push(self, choices: Sequence[TokenChoice]) -> tuple[str, tuple[TextToken, ...]]:
        """Add tokens; return the text that is complete with them, and its tokens.

        Tokens after a stop token or a stop string are dropped, and the stop token itself.
        """
        text = ""
        for choice in choices:
            if choice.token in self._stop_tokens:
                self.is_stopped = True
                text += self._rest()
                tokens = self._release(text, everything=not self._is_cut)
                if not self._is_cut:
                    self.stop_token = TextToken(choice, self._released)
                return text, tokens
            added = self._detokenizer.push(choice.token)
            begin = self._detokenizer.begin
            token = TextToken(choice, self._decoded + begin)
            self._held.append(_HeldToken(token, added[begin:]))
            self._decoded += len(added)
            released, self._is_cut = self._stop_strings.push(added)
            text += released
            if self._is_cut:
                self.is_stopped = True
                break
        return text, self._release(text, everything=False)

    def finish(self) -> tuple[str, tuple[TextToken, ...]]:
        """Return what was held back, when no further token follows."""
        if self.is_stopped:
            return "", ()
        text = self._rest()
        self.is_stopped = self._is_cut
        return text, self._release(text, everything=not self._is_cut)

    def _rest(self) -> str:
        released, self._is_cut = self._stop_strings.push(self._detokenizer.finish())
        return released + self._stop_strings.finish()

    def _release(self, text: str, *, everything: bool) -> tuple[TextToken, ...]:
        self._released += len(text)
        end = self._released
        count = sum(
            everything or (held.token.offset < end and (self._is_cut or held.end <= end))
            for held in self._held
        )
        released, self._held = self._held[:count], self._held[count:]
        return tuple(held.cut(end) if self._is_cut else held.token for held in released)
