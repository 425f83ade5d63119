"""An engine without a model: the next token follows from the tokens in the KV cache of its slot.

It remembers tokens in place of keys and values, so that a prefix that does not belong to a prompt
gives another answer, as in a real engine. With a sliding window, the answer follows from the window
alone, read from a rolling buffer that is overwritten as that of a real engine is. An adapter
adds its number to each token of its answers.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence

from graphtrain.config.schema.serve import TOP_LOG_PROBS
from graphtrain.run.serving.engine_protocol import SamplingParameters, TokenChoice
from graphtrain.run.serving.row_engine import PackedRow, RowTokens, TargetScore
from graphtrain.run.serving.written_positions import WrittenPositions

Answer = Callable[[Sequence[int], int], int]  # tokens before, seed


def digest_answer(vocab: int) -> Answer:
    """Next tokens that look random and depend on every token before and the seed."""

    def answer(tokens: Sequence[int], seed: int) -> int:
        text = f"{seed}:{','.join(map(str, tokens))}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) % vocab

    return answer


def written_answer(text: bytes) -> Answer:
    """One text in bytes, from its beginning after any prompt that ends with a colon."""

    def answer(tokens: Sequence[int], seed: int) -> int:
        del seed
        begin = bytes(tokens).rfind(b":") + 1
        return text[(len(tokens) - begin) % len(text)]

    return answer


_NOTHING = -1  # written by padding, and by slots that are not active


class ToyEngine:
    def __init__(
        self,
        slots: int = 4,
        context_length: int = 256,
        chunk: int = 16,
        vocab: int = 257,
        tokens_per_call: int = 3,
        seconds_per_call: float = 0.0,
        answer: Answer | None = None,
        window: int | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        self.slots, self.context_length, self.chunk, self.vocab = (
            slots, context_length, chunk, vocab,
        )  # fmt: skip
        self._tokens_per_call, self._seconds = tokens_per_call, seconds_per_call
        self._answer = answer or digest_answer(min(vocab, 256))
        self.window = window
        positions = context_length if window is None else window + chunk - 1
        self.rolling = [[_NOTHING] * positions for _ in range(slots)]
        self._written = WrittenPositions(slots, context_length, chunk, positions)
        self.adapters = adapters
        self._adapter_of: list[str | None] = [None] * slots  # that wrote the cache
        self.caches: list[list[int]] = [[] for _ in range(slots)]
        self._active: dict[int, tuple[SamplingParameters, list[int]]] = {}
        self.calls: list[tuple[str, int]] = []  # name and number of tokens
        self.failure: Exception | None = None  # raised by the next call

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
        self._begin_call("prefill", len(tokens))
        assert 0 < len(tokens) <= self.chunk and offset <= len(self.caches[slot])
        assert not offset or self._adapter_of[slot] == adapter, "a prefix of another adapter"
        self._adapter_of[slot] = adapter
        self._active.pop(slot, None)
        self.caches[slot][offset:] = tokens
        padding = [_NOTHING] * (self.chunk - len(tokens))
        self._write(slot, offset, [*tokens, *padding])
        self._written.prefill(slot, offset, len(tokens), self.chunk)
        if sampling is None:
            return None
        assert self.caches[slot] == list(prompt), "the KV cache is not that of the prompt"
        self._active[slot] = sampling, []
        return self._next(slot)

    def decode(self) -> list[list[TokenChoice]]:
        self._begin_call("decode", len(self._active))
        chosen: list[list[TokenChoice]] = [[] for _ in range(self.slots)]
        for slot in set(range(self.slots)) - set(self._active):
            self._write(slot, len(self.caches[slot]), [_NOTHING])
        for slot in list(self._active):
            while slot in self._active and len(chosen[slot]) < self._tokens_per_call:
                token = self._active[slot][1][-1]
                self._write(slot, len(self.caches[slot]), [token])
                self.caches[slot].append(token)
                self._written.decode(slot, 1)
                chosen[slot].append(self._next(slot))
        return chosen

    def release(self, slot: int) -> None:
        self._active.pop(slot, None)

    def can_reuse(self, slot: int, length: int) -> bool:
        return self._written.can_reuse(slot, length)

    def _write(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        rolling = self.rolling[slot]
        for index, token in enumerate(tokens):
            rolling[(position + index) % len(rolling)] = token

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        self.calls.append(("copy", length))
        assert destination not in self._active and length <= len(self.caches[source])
        self.caches[destination] = self.caches[source][:length]
        self.rolling[destination] = list(self.rolling[source])
        self._written.copy(source, destination)
        self._adapter_of[destination] = self._adapter_of[source]

    def score(
        self, tokens: Sequence[int], *, adapter: str | None = None
    ) -> list[TokenChoice | None]:
        assert len(tokens) <= self.context_length + 1
        self._begin_call("score", len(tokens))
        choices = [
            self._choice(token, tokens[:index], adapter) for index, token in enumerate(tokens)
        ]
        return [None, *choices[1:]]

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return (max(1, self.chunk // 4), self.chunk)

    @property
    def call_tokens(self) -> int:
        return 64

    def score_rows(self, rows: Sequence[RowTokens], size: int) -> list[list[TargetScore]]:
        self._begin_call("score_rows", size)
        assert len(rows) == self.slots and size in self.row_sizes
        scores = []
        for slot, row in enumerate(rows):
            held = self.caches[slot]
            assert len(row.tokens) <= size >= len(row.targets) and row.offset <= len(held)
            assert row.offset + size <= self.context_length + self.row_sizes[0]
            held[row.offset :] = row.tokens
            padding = [_NOTHING] * (size - len(row.tokens))
            self._write(slot, row.offset, [*row.tokens, *padding])
            self._written.prefill(slot, row.offset, len(row.tokens), size)
            choices = [
                self._choice(token, self._before(slot, row.offset + at + 1), None)
                for at, token in row.targets
            ]
            scores.append(
                [TargetScore(one.log_prob, one.token == one.top[0][0]) for one in choices]
            )
        return scores

    @property
    def packed_rows(self) -> int:
        return 1 if self.slots % 2 else 2

    @property
    def packed_sizes(self) -> tuple[int, ...]:
        return (max(1, self.chunk // 4), self.chunk)

    def score_packed(
        self, rows: Sequence[PackedRow], prefix: int, size: int
    ) -> list[list[TargetScore]]:
        self._begin_call("score_packed", sum(len(row.tokens) for row in rows))
        assert len(rows) == self.packed_rows and size in self.packed_sizes
        scores = []
        for slot, row in enumerate(rows):
            assert len(row.tokens) <= size >= len(row.targets)
            assert not row.tokens or self.can_reuse(slot, prefix)
            held = self._before(slot, prefix) if row.tokens else []
            scores.append([self._packed_score(row, held, prefix, *one) for one in row.targets])
        return scores

    def _packed_score(
        self, row: PackedRow, held: list[int], prefix: int, last: int, token: int
    ) -> TargetScore:
        own = {
            row.positions[at]: row.tokens[at]
            for at in range(last + 1)
            if row.texts[at] == row.texts[last] and row.branches[at] in (0, row.branches[last])
        }
        assert sorted(own) == list(range(prefix, prefix + len(own)))
        before = [*held, *(own[position] for position in sorted(own))]
        choice = self._choice(token, before[-(self.window or len(before)) :], None)
        return TargetScore(choice.log_prob, choice.token == choice.top[0][0])

    def is_active(self, slot: int) -> bool:
        return slot in self._active

    def _begin_call(self, name: str, tokens: int) -> None:
        self.calls.append((name, tokens))
        time.sleep(self._seconds)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _next(self, slot: int) -> TokenChoice:
        sampling, generated = self._active[slot]
        adapter = self._adapter_of[slot]
        token = self._adapted(self._seen(slot), sampling.seed, adapter)
        if sampling.logit_bias:
            token = max(sampling.logit_bias, key=lambda token: sampling.logit_bias[token])
        generated.append(token)
        if (
            token in sampling.stop_tokens
            or len(generated) == sampling.max_tokens
            or len(self.caches[slot]) + 1 >= self.context_length
        ):
            del self._active[slot]
        return self._choice(token, self.caches[slot], adapter)

    def _seen(self, slot: int) -> list[int]:
        """Return the tokens that the next one follows from."""
        return self._before(slot, len(self.caches[slot]))

    def _before(self, slot: int, end: int) -> list[int]:
        if self.window is None:
            return self.caches[slot][:end]
        rolling = self.rolling[slot]
        return [rolling[at % len(rolling)] for at in range(max(0, end - self.window), end)]

    def _adapted(self, before: Sequence[int], seed: int, adapter: str | None) -> int:
        shift = 0 if adapter is None else 1 + self.adapters.index(adapter)
        return (self._answer(before, seed) + shift) % min(self.vocab, 256)

    def _choice(self, token: int, before: Sequence[int], adapter: str | None) -> TokenChoice:
        best = self._adapted(before, 0, adapter)
        others = [other % self.vocab for other in range(best, best + TOP_LOG_PROBS)]
        top = [(other, -1.0 - index) for index, other in enumerate(others)]
        return TokenChoice(token, dict(top).get(token, -math.inf), tuple(top))
