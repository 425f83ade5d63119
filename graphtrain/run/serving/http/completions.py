"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from graphtrain.run.serving.http.prepare import Prepared
from graphtrain.run.serving.http.requests import CompletionRequest
from graphtrain.run.serving.http.responses import (
    Answer,
    completion_choice,
    joined_logprobs,
    usage_of,
)
from graphtrain.run.serving.http.submission import Sequence, Submission
from graphtrain.run.serving.sequence import TextToken, Update, mean_log_prob
from graphtrain.run.serving.worker import OpenedModel


def completion_result(
    request: CompletionRequest,
    prepared: Prepared,
    sequences: list[Sequence],
    answer: Answer,
    model: OpenedModel,
) -> dict[str, Any]:
    """Return the answer to a completion that is not streamed."""
    generated, scored = sequences[: len(prepared.sequences)], sequences[len(prepared.sequences) :]
    choices = []
    for index, prompt in enumerate(prepared.prompts):
        samples = generated[index * prepared.samples :][: prepared.samples]
        samples = _best(samples, request.n) or [Sequence(finish_reason="length")]
        text = model.tokenizer.decode(prompt) if request.echo else ""
        begin = None
        if request.echo and request.logprobs is not None:
            begin = answer.prompt_logprobs(prompt, scored[index].scores, request.logprobs)
        for sample in samples:
            logprobs = None
            if request.logprobs is not None:
                logprobs = answer.completion_logprobs(
                    _with_stop_token(sample), request.logprobs, len(text)
                )
                logprobs = logprobs if begin is None else joined_logprobs(begin, logprobs)
            choices.append(
                completion_choice(len(choices), text + sample.text, logprobs, sample.finish_reason)
            )
    usage = usage_of(prepared.prompts, (sequence.usage for sequence in generated))
    return answer.whole(choices, usage)


def _with_stop_token(sequence: Sequence | Update) -> list[TextToken]:
    """Return the tokens that usage counts, as vLLM does: with one that ended the text.

    lm-eval asks for one token after a text, and takes the last entry to be that one.
    """
    stop = sequence.stop_token
    return [*sequence.tokens] if stop is None else [*sequence.tokens, stop]


def _best(samples: list[Sequence], count: int) -> list[Sequence]:
    """Return the samples with the highest log-probability per token."""
    if len(samples) <= count:
        return samples
    return sorted(samples, key=lambda one: mean_log_prob(one.tokens), reverse=True)[:count]


async def completion_chunks(
    request: CompletionRequest,
    prepared: Prepared,
    submission: Submission,
    answer: Answer,
    model: OpenedModel,
) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a completion."""
    shifts = [0] * len(prepared.prompts)
    if request.echo:
        for index, prompt in enumerate(prepared.prompts):
            text = model.tokenizer.decode(prompt)
            shifts[index] = len(text)
            for sample in range(prepared.samples):
                choice = completion_choice(index * prepared.samples + sample, text, None, None)
                yield answer.chunk([choice])
    async for update in submission.updates():
        if update.index >= len(prepared.sequences):  # scores of a prompt
            index = update.index - len(prepared.sequences)
            logprobs = answer.prompt_logprobs(
                prepared.prompts[index], update.scores, request.logprobs or 0
            )
            for sample in range(prepared.samples):
                choice = completion_choice(index * prepared.samples + sample, "", logprobs, None)
                yield answer.chunk([choice])
            continue
        logprobs = None
        if request.logprobs is not None:
            shift = shifts[update.index // prepared.samples]
            logprobs = answer.completion_logprobs(_with_stop_token(update), request.logprobs, shift)
        choice = completion_choice(update.index, update.text, logprobs, update.finish_reason)
        yield answer.chunk([choice])
    if request.stream_options is not None and request.stream_options.include_usage:
        usages = (sequence.usage for sequence in submission.sequences[: len(prepared.sequences)])
        yield answer.chunk([], usage_of(prepared.prompts, usages))
