"""Generation for many prompts: sampled in the slots of an engine, or by beam search."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphtrain.data.prepare.conversations import Conversation
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError
from graphtrain.run.prompt import encode_prompt
from graphtrain.run.prompt_file import Prompt
from graphtrain.run.serving.beam_search import BeamEngine, BeamSettings, beam_search
from graphtrain.run.serving.chat_format import ChatFormat
from graphtrain.run.serving.engine_protocol import Engine, SamplingParameters, TokenChoice
from graphtrain.run.serving.scheduler import Job, Scheduler
from graphtrain.run.serving.sequence import (
    FinishReason,
    GeneratedText,
    SequenceRequest,
    TextToken,
    Update,
    mean_log_prob,
)


@dataclass(frozen=True)
class Continuation:
    """Text that was generated after a prompt."""

    text: str  # without the prompt
    tokens: tuple[int, ...]  # ids, without the one that ended it
    finish_reason: FinishReason  # stop: it ended by itself; length: at the limit of tokens
    # Mean of its tokens, 0 if there are none; after a beam search the score, see search_all().
    log_prob: float

    def __str__(self) -> str:
        return self.text


class RequestEncoder:
    """Prompts as the requests of an engine.

    Args:
        tokenizer: Tokenizer of the model.
        prefix: Tokens that begin a prompt.
        open_chat: Returns the chat template, which only conversations need; None: there is none.
        context_length: Number of tokens that a sequence may have.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prefix: tuple[int, ...],
        open_chat: Callable[[], ChatFormat | None],
        context_length: int,
    ) -> None:
        self._tokenizer, self._prefix, self._context = tokenizer, prefix, context_length
        self._open_chat = functools.cache(open_chat)

    def request(self, prompt: Prompt, sampling: SamplingParameters) -> SequenceRequest:
        """Return the request that continues a prompt, as far as the context has room.

        The ends of documents and answers are added to the stop tokens.

        Raises:
            DataError: the prompt is empty or too long, or the chat template refuses it.
        """
        eod = self._tokenizer.eod
        ends, stop = (*sampling.stop_tokens, *(() if eod is None else (eod,))), ()
        if isinstance(prompt.content, Conversation):
            chat = self._chat_for(prompt)
            try:
                tokens = chat.prompt(prompt.content)
            except DataError as error:
                raise DataError(f"{prompt.place}: {error}") from None
            ends, stop = (*chat.stop_tokens, *ends), chat.stop
        else:
            tokens = encode_prompt(self._tokenizer, prompt.content, self._prefix)
        if not tokens:
            raise DataError(f"{prompt.place}: the prompt is empty, so there is nothing to continue")
        if (room := self._context - len(tokens)) < 1:
            raise DataError(
                f"{prompt.place}: the prompt has {len(tokens)} tokens, which do not fit into the "
                f"context of {self._context} with one more (program.serve.context_length)"
            )
        sampling = replace(
            sampling,
            max_tokens=min(sampling.max_tokens, room),
            stop_tokens=tuple(dict.fromkeys(ends)),
        )
        return SequenceRequest(prompt=tuple(tokens), sampling=sampling, stop=stop)

    def _chat_for(self, prompt: Prompt) -> ChatFormat:
        if (chat := self._open_chat()) is None:
            raise DataError(
                f"{prompt.place}: the tokenizer of this model has no chat template for messages; "
                "give prompts as text, or generate with --chat-template"
            )
        return chat


def continuations_as_json(continuations: Sequence[Continuation]) -> dict[str, Any]:
    """Return a prompt's continuations for JSON: the best one, and all if there are more."""
    documents = [
        {
            "text": one.text,
            "tokens": one.tokens,
            "finish_reason": one.finish_reason,
            "log_prob": round(one.log_prob, 6),
        }
        for one in continuations
    ]
    return documents[0] | ({"samples": documents} if len(documents) > 1 else {})


def continue_all(
    engine: Engine, tokenizer: Tokenizer, requests: Sequence[SequenceRequest], samples: int
) -> Iterator[list[Continuation]]:
    """Yield the continuations of each request, in order; of several, the most likely one first.

    Sample number i has the seed of its request plus i. A request is submitted when few wait, so
    that the samples of a prompt follow each other, and share its KV cache.

    Raises:
        UserError: a sequence failed.
    """
    scheduler = Scheduler(engine, tokenizer.decode)
    pending = deque(_Collector(request, samples) for request in requests)
    submitted = deque[_Collector]()
    while pending or submitted:
        while pending and scheduler.statistics.waiting < engine.slots:
            submitted.append(pending.popleft())
            scheduler.submit(submitted[-1].job)
        for job, updates in scheduler.step().items():
            job.deliver(updates)
        while submitted and submitted[0].is_complete:
            yield submitted.popleft().best_first()


def search_all(
    engine: BeamEngine,
    tokenizer: Tokenizer,
    requests: Sequence[SequenceRequest],
    settings: BeamSettings,
    count: int,
) -> Iterator[list[Continuation]]:
    """Yield the `count` best continuations of each request by beam search, in order, best first.

    The log-probability of a continuation is its score: that of all its tokens, with the one that
    ended it, divided by their number to the power of the length penalty.

    Raises:
        UserError: the logits are not finite.
    """
    for request in requests:
        has_ended = functools.partial(_has_ended, request, tokenizer)
        length = request.sampling.max_tokens
        found = beam_search(engine, request.prompt, settings, length, has_ended)[:count]
        yield [
            Continuation(
                *_read(request, tokenizer, beam.tokens), beam.score(settings.length_penalty)
            )
            for beam in found
        ]


def _has_ended(request: SequenceRequest, tokenizer: Tokenizer, tokens: Sequence[int]) -> bool:
    if tokens[-1] in request.sampling.stop_tokens:
        return True
    return bool(request.stop) and _read(request, tokenizer, tokens)[-1] == "stop"


def _read(
    request: SequenceRequest, tokenizer: Tokenizer, tokens: Sequence[int]
) -> tuple[str, tuple[int, ...], FinishReason]:
    """Return the text of generated tokens, those that it consists of, and why it ends."""
    generated = GeneratedText(request, tokenizer.decode)
    parts = generated.push([TokenChoice(token, 0.0, ()) for token in tokens]), generated.finish()
    text = "".join(text for text, _ in parts)
    kept = tuple(token.choice.token for _, tokens in parts for token in tokens)
    return text, kept, "stop" if generated.is_stopped else "length"


class _Collector:
    """Samples of one prompt, as they are generated."""

    def __init__(self, request: SequenceRequest, samples: int) -> None:
        seed = request.sampling.seed
        requests = [
            replace(request, sampling=replace(request.sampling, seed=seed + index))
            for index in range(samples)
        ]
        self.job = Job(tuple(requests), self._collect)
        self._texts = [""] * samples
        self._tokens: list[list[TextToken]] = [[] for _ in requests]
        self._reasons: dict[int, FinishReason] = {}

    @property
    def is_complete(self) -> bool:
        return len(self._reasons) == len(self._texts)

    def best_first(self) -> list[Continuation]:
        continuations = [
            Continuation(
                self._texts[index],
                tuple(token.choice.token for token in self._tokens[index]),
                self._reasons[index],
                mean_log_prob(self._tokens[index]),
            )
            for index in range(len(self._texts))
        ]
        return sorted(continuations, key=lambda one: one.log_prob, reverse=True)

    def _collect(self, updates: list[Update]) -> None:
        for update in updates:
            if update.error is not None:
                raise update.error
            self._texts[update.index] += update.text
            self._tokens[update.index] += update.tokens
            if update.finish_reason is not None:
                self._reasons[update.index] = update.finish_reason
