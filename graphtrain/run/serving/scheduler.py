"""Continuous batching: sequences join and leave the slots of an engine while others are generated.

A step of the scheduler processes prompts, at most `chunk` tokens (chunked prefill), and then
generates the next tokens of all active sequences. So a long prompt does not stall them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphtrain.run.serving.detokenizer import Decode
from graphtrain.run.serving.engine_protocol import Engine, SlotErrors, TokenChoice
from graphtrain.run.serving.fair_queue import FairQueue
from graphtrain.run.serving.sequence import (
    FinishReason,
    GeneratedText,
    ScoreRequest,
    SequenceRequest,
    Update,
    Usage,
)
from graphtrain.run.serving.slots import Slots
from sharding_rules.errors import UserError

_MAX_PREFILLS = 16  # in a step: each call takes time, however few its tokens are

Deliver = Callable[[list[Update]], None]


@dataclass(frozen=True, eq=False)
class Job:
    """Sequences of one request."""

    requests: tuple[SequenceRequest | ScoreRequest, ...]
    deliver: Deliver  # called with their progress, in the thread of the engine


@dataclass
class Statistics:
    """Counters since the start, and the state of the scheduler now."""

    waiting: int = 0  # sequences without a slot
    prefilling: int = 0  # sequences whose prompt is processed
    active: int = 0  # sequences that are generated
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV cache was reused
    generated_tokens: int = 0
    finished: int = 0  # sequences
    cancelled: int = 0
    failed: int = 0


@dataclass(eq=False)
class _Sequence:
    job: Job
    index: int
    request: SequenceRequest
    text: GeneratedText
    submitted: float
    slot: int = -1
    cached: int = 0  # tokens of the prompt that were not computed
    processed: int = 0  # tokens of the prompt
    generated: int = 0
    last_token: int = -1  # generated
    started: float = 0.0
    first_token: float = 0.0

    def usage(self, now: float) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
            generated_tokens=self.generated,
            queue_seconds=self.started - self.submitted,
            first_token_seconds=self.first_token - self.submitted,
            seconds=now - self.submitted,
        )


@dataclass(eq=False)
class _Score:
    job: Job
    index: int
    request: ScoreRequest
    submitted: float


class Scheduler:
    """Sequences in the slots of an engine. All methods are called from one thread.

    Args:
        engine: The model.
        decode: Decoder of its tokenizer.
    """

    def __init__(self, engine: Engine, decode: Decode) -> None:
        self._engine, self._decode = engine, decode
        self._slots = Slots(engine.slots, engine.can_reuse)
        self._waiting: FairQueue[Job, _Sequence | _Score] = FairQueue()
        self._prefilling: deque[_Sequence] = deque()
        self._active: dict[int, _Sequence] = {}  # by slot
        self._updates: dict[Job, list[Update]] = {}
        self.statistics = Statistics()

    def submit(self, job: Job) -> None:
        """Queue the sequences of a request."""
        now = time.monotonic()
        for index, request in enumerate(job.requests):
            if isinstance(request, ScoreRequest):
                self._waiting.push(job, _Score(job, index, request, now))
            else:
                text = GeneratedText(request, self._decode)
                self._waiting.push(job, _Sequence(job, index, request, text, now))
        self._count_states()

    def cancel(self, job: Job) -> None:
        """End all sequences of a request, without an update."""
        before = len(self._waiting)
        self._waiting.remove(job)
        self.statistics.cancelled += before - len(self._waiting)
        for sequence in [*self._prefilling, *self._active.values()]:
            if sequence.job is job:
                self._leave(sequence)
                self.statistics.cancelled += 1
        self._updates.pop(job, None)
        self._count_states()

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._active)

    def step(self) -> dict[Job, list[Update]]:
        """Process prompts and generate tokens; return the progress of each request."""
        self._admit()
        self._prefill()
        if self._active:
            self._generate()
        self._count_states()
        updates, self._updates = self._updates, {}
        return updates

    def _admit(self) -> None:
        """Give free slots to waiting sequences, and score at most one text."""
        while self._waiting and self._slots.free:
            sequence = self._waiting.pop()
            if isinstance(sequence, _Score):
                self._score(sequence)
                return
            placement = self._slots.place(sequence.request.prompt, sequence.request.adapter)
            sequence.slot, sequence.started = placement.slot, time.monotonic()
            self._prefilling.append(sequence)
            if placement.source != placement.slot:
                self._engine.copy_prefix(placement.source, placement.slot, placement.length)
            self._reuse(sequence, placement.length)

    def _reuse(self, sequence: _Sequence, length: int) -> None:
        """Count the first tokens of a prompt as processed."""
        self.statistics.cached_tokens += length - sequence.processed
        sequence.cached += length - sequence.processed
        sequence.processed = length

    def _prefill(self) -> None:
        """Process at most one chunk of prompts, which take turns."""
        budget = self._engine.chunk
        while self._prefilling and budget > 0:
            sequence = self._prefilling[0]
            prompt = sequence.request.prompt
            if prefix := self._slots.longer_prefix(sequence.slot, prompt):
                self._engine.copy_prefix(prefix.source, sequence.slot, prefix.length)
                self._reuse(sequence, prefix.length)
            chunk = prompt[sequence.processed : sequence.processed + self._engine.chunk]
            if len(chunk) > budget < self._engine.chunk:
                return
            budget -= max(len(chunk), self._engine.chunk // _MAX_PREFILLS)
            self._prefill_chunk(sequence, chunk)

    def _prefill_chunk(self, sequence: _Sequence, chunk: Sequence[int]) -> None:
        """Process the next tokens of a prompt; with the last ones, generate the first token."""
        prompt, offset = sequence.request.prompt, sequence.processed
        is_last = offset + len(chunk) == len(prompt)
        sampling, adapter = sequence.request.sampling if is_last else None, sequence.request.adapter
        try:
            choice = self._engine.prefill(
                sequence.slot, chunk, offset, sampling, prompt=prompt, adapter=adapter
            )
        except UserError as error:
            self._fail(sequence, error)
            return
        sequence.processed += len(chunk)
        self._slots.extend(sequence.slot, chunk)
        self.statistics.prompt_tokens += len(chunk)
        self._prefilling.popleft()
        if choice is None:
            self._prefilling.append(sequence)
        else:
            sequence.first_token = time.monotonic()
            self._active[sequence.slot] = sequence
            self._continue(sequence, [choice])

    def _generate(self) -> None:
        try:
            choices = self._engine.decode()
        except SlotErrors as failed:
            for slot, error in failed.errors.items():
                self._fail(self._active[slot], error)
            choices = failed.choices
        except UserError as error:
            for sequence in list(self._active.values()):
                self._fail(sequence, error)
            return
        for slot, sequence in list(self._active.items()):
            self._continue(sequence, choices[slot])

    def _continue(self, sequence: _Sequence, choices: list[TokenChoice]) -> None:
        """Add generated tokens to a sequence, which may end with them."""
        if sequence.generated and choices:  # the last token has no keys and values yet
            self._slots.extend(sequence.slot, [sequence.last_token])
        self._slots.extend(sequence.slot, (choice.token for choice in choices[:-1]))
        sequence.generated += len(choices)
        sequence.last_token = choices[-1].token if choices else sequence.last_token
        self.statistics.generated_tokens += len(choices)
        text, tokens = sequence.text.push(choices)
        if self._engine.is_active(sequence.slot) and not sequence.text.is_stopped:
            if text or tokens:
                self._report(sequence, Update(index=sequence.index, text=text, tokens=tokens))
            return
        rest, rest_tokens = sequence.text.finish()
        reason: FinishReason = "stop" if sequence.text.is_stopped else "length"
        update = Update(
            index=sequence.index,
            text=text + rest,
            tokens=tokens + rest_tokens,
            stop_token=sequence.text.stop_token,
            finish_reason=reason,
            usage=sequence.usage(time.monotonic()),
        )
        self._leave(sequence)
        self.statistics.finished += 1
        self._report(sequence, update)

    def _score(self, score: _Score) -> None:
        now = time.monotonic()
        try:
            scores = self._engine.score(score.request.prompt, adapter=score.request.adapter)
        except UserError as error:
            self.statistics.failed += 1
            self._report(score, Update(index=score.index, error=error))
            return
        self.statistics.prompt_tokens += len(scores)
        self.statistics.finished += 1
        usage = Usage(
            prompt_tokens=len(scores),
            cached_tokens=0,
            generated_tokens=0,
            queue_seconds=now - score.submitted,
            first_token_seconds=time.monotonic() - score.submitted,
            seconds=time.monotonic() - score.submitted,
        )
        self._report(score, Update(index=score.index, scores=tuple(scores), usage=usage))

    def _fail(self, sequence: _Sequence, error: Exception) -> None:
        self._slots.keep(sequence.slot, ())
        self._leave(sequence)
        self.statistics.failed += 1
        self._report(sequence, Update(index=sequence.index, error=error))

    def _leave(self, sequence: _Sequence) -> None:
        """Free the slot of a sequence."""
        if self._active.pop(sequence.slot, None) is None:
            self._prefilling.remove(sequence)
        if self._engine.is_active(sequence.slot):
            self._engine.release(sequence.slot)
        self._slots.release(sequence.slot)

    def _report(self, sequence: _Sequence | _Score, update: Update) -> None:
        self._updates.setdefault(sequence.job, []).append(update)

    def _count_states(self) -> None:
        self.statistics.waiting = len(self._waiting)
        self.statistics.prefilling = len(self._prefilling)
        self.statistics.active = len(self._active)
