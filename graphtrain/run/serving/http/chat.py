"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from graphtrain.run.serving.http.prepare import Prepared
from graphtrain.run.serving.http.requests import ChatRequest
from graphtrain.run.serving.http.responses import (
    Answer,
    chat_choice,
    chat_chunk_choice,
    usage_of,
)
from graphtrain.run.serving.http.submission import Sequence, Submission
from graphtrain.run.serving.worker import OpenedModel


def chat_result(
    request: ChatRequest,
    prepared: Prepared,
    sequences: list[Sequence],
    answer: Answer,
    model: OpenedModel,
) -> dict[str, Any]:
    """Return the answer to a conversation that is not streamed."""
    choices = [
        chat_choice(
            index,
            sequence.text,
            answer.chat_logprobs(sequence.tokens, request.top_logprobs)
            if request.logprobs
            else None,
            sequence.finish_reason,
        )
        for index, sequence in enumerate(sequences)
    ]
    return answer.whole(choices, usage_of(prepared.prompts, (one.usage for one in sequences)))


async def chat_chunks(
    request: ChatRequest,
    prepared: Prepared,
    submission: Submission,
    answer: Answer,
    model: OpenedModel,
) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of an answer."""
    for index in range(prepared.samples):
        yield answer.chunk([chat_chunk_choice(index, {"role": "assistant", "content": ""})])
    async for update in submission.updates():
        if update.text or update.tokens:
            logprobs = None
            if request.logprobs:
                logprobs = answer.chat_logprobs(update.tokens, request.top_logprobs)
            delta = {"content": update.text}
            yield answer.chunk([chat_chunk_choice(update.index, delta, logprobs)])
        if update.finish_reason is not None:
            choice = chat_chunk_choice(update.index, {}, None, update.finish_reason)
            yield answer.chunk([choice])
    if request.stream_options is not None and request.stream_options.include_usage:
        usage = usage_of(prepared.prompts, (one.usage for one in submission.sequences))
        yield answer.chunk([], usage)
