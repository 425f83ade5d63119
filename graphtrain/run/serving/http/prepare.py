"""Preparation of a checked request: prompts as tokens, and how to continue each."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from graphtrain.config.schema.serve import STOP_TOKENS
from graphtrain.data.prepare.conversations import read_conversations
from graphtrain.errors import DataError
from graphtrain.run.prompt import encode_prompt
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.http.errors import ApiError
from graphtrain.run.serving.http.messages import check_fields, parse_arguments
from graphtrain.run.serving.http.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from graphtrain.run.serving.sequence import ScoreRequest, SequenceRequest
from graphtrain.run.serving.worker import OpenedModel


@dataclass(frozen=True)
class Prepared:
    """Sequences of a request: `samples` for each prompt, then the scores of each, if asked."""

    prompts: tuple[tuple[int, ...], ...]
    samples: int  # per prompt
    sequences: tuple[SequenceRequest, ...]
    scores: tuple[ScoreRequest, ...] = ()

    @property
    def requests(self) -> tuple[SequenceRequest | ScoreRequest, ...]:
        return *self.sequences, *self.scores


def prepare_completion(
    request: CompletionRequest, model: OpenedModel, adapter: str | None
) -> Prepared:
    """Tokenize the prompts of a completion, which an adapter or the base generates.

    Raises:
        ApiError: a prompt is empty, longer than the context, or has unknown tokens.
    """
    prompts = tuple(tuple(prompt) for prompt in _prompts(request, model))
    for prompt in prompts:
        _check_prompt(prompt, request.max_tokens, model, "prompt")
    samples = (request.best_of or request.n) if request.max_tokens else 0
    sampling = _sampling(request, max(1, request.max_tokens), _ends(request, model), model)
    sequences = _sequences(prompts, samples, sampling, _stop(request), adapter)
    is_scored = request.echo and request.logprobs is not None
    scores = [ScoreRequest(prompt=prompt, adapter=adapter) for prompt in prompts if is_scored]
    return Prepared(prompts, samples, sequences, tuple(scores))


def prepare_chat(request: ChatRequest, model: OpenedModel, adapter: str | None) -> Prepared:
    """Render and tokenize a conversation, which an adapter or the base answers.

    Raises:
        ApiError: there is no chat template, it fails, or the conversation is too long.
    """
    chat = model.chat
    if chat is None:
        raise ApiError(
            400,
            "the tokenizer of this model has no chat template; use /v1/completions, or start the "
            "server with --chat-template",
            "messages",
        )
    tools = request.tools if request.tool_choice == "auto" else None
    record = {"messages": parse_arguments(request.messages), "tools": tools}
    try:
        (conversation,) = read_conversations(record, "messages", "messages", is_prompt=True)
        check_fields(request.messages, conversation, chat.template)
        prompt = tuple(chat.prompt(conversation))
    except DataError as error:
        raise ApiError(400, str(error), "messages") from None
    asked = request.max_completion_tokens or request.max_tokens
    _check_prompt(prompt, asked or 1, model, "messages")
    max_tokens = asked or model.engine.context_length - len(prompt)
    ends = (*_ends(request, model), *(() if request.ignore_eos else chat.stop_tokens))
    sampling = _sampling(request, max_tokens, ends, model)
    stop = (*_stop(request), *(() if request.ignore_eos else chat.stop))
    sequences = _sequences((prompt,), request.n, sampling, stop, adapter)
    return Prepared((prompt,), request.n, sequences)


def _prompts(request: CompletionRequest, model: OpenedModel) -> list[list[int]]:
    given = request.prompt
    if isinstance(given, str):
        given = [given]
    if given and isinstance(given[0], int):
        given = [given]  # type: ignore[list-item]
    if not given:
        raise ApiError(400, "prompt is empty", "prompt")
    return [
        encode_prompt(model.tokenizer, prompt, model.prefix) if isinstance(prompt, str) else prompt  # type: ignore[misc]
        for prompt in given
    ]


def _check_prompt(prompt: tuple[int, ...], max_tokens: int, model: OpenedModel, param: str) -> None:
    """Check that a prompt and its answer fit into the context.

    Raises:
        ApiError: they do not, or the prompt is empty or has unknown tokens.
    """
    if not prompt:
        raise ApiError(400, f"{param} is empty, so there is nothing to continue", param)
    if (largest := max(prompt)) >= model.engine.vocab:
        raise ApiError(
            400, f"token id {largest} is not below the vocabulary size {model.engine.vocab}", param
        )
    longest = model.engine.context_length
    if len(prompt) + max_tokens > longest:
        raise ApiError(
            400,
            f"this model's context is {longest} tokens, but {len(prompt) + max_tokens} were asked "
            f"for: {len(prompt)} in {param}, {max_tokens} to generate; shorten one of them",
            param,
            "context_length_exceeded",
        )


def _ends(request: GenerationRequest, model: OpenedModel) -> tuple[int, ...]:
    """Return the tokens that end a sequence.

    Raises:
        ApiError: one of them is not in the vocabulary.
    """
    eod, vocab = model.tokenizer.eod, model.engine.vocab
    if (largest := max(request.stop_token_ids, default=0)) >= vocab:
        raise ApiError(
            400,
            f"stop_token_ids: token id {largest} is not below the vocabulary size {vocab}",
            "stop_token_ids",
        )
    return *request.stop_token_ids, *(() if eod is None or request.ignore_eos else (eod,))


def _stop(request: GenerationRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _sampling(
    request: GenerationRequest, max_tokens: int, ends: tuple[int, ...], model: OpenedModel
) -> SamplingParameters:
    """Return the settings of the first sample of each prompt."""
    stop_tokens = tuple(dict.fromkeys(ends))
    if len(stop_tokens) > STOP_TOKENS:
        raise ApiError(
            400,
            f"{len(stop_tokens)} stop tokens with those of the model; at most {STOP_TOKENS} are "
            "supported",
            "stop_token_ids",
        )
    seed = secrets.randbits(31) if request.seed is None else request.seed
    return SamplingParameters(
        temperature=request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_logit_bias(request, model),
        seed=seed,
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
    )


def _logit_bias(request: GenerationRequest, model: OpenedModel) -> dict[int, float]:
    biases = {}
    for token, bias in request.logit_bias.items():
        is_number = token.isascii() and token.isdigit() and len(token) < 10
        if not is_number or int(token) >= model.engine.vocab:
            raise ApiError(
                400,
                f"logit_bias: {token[:80]!r} is not a token id below {model.engine.vocab}",
                "logit_bias",
            )
        biases[int(token)] = bias
    return biases


def _sequences(
    prompts: tuple[tuple[int, ...], ...],
    samples: int,
    sampling: SamplingParameters,
    stop: tuple[str, ...],
    adapter: str | None,
) -> tuple[SequenceRequest, ...]:
    seeds = [sampling.seed + sample for sample in range(samples)]
    return tuple(
        SequenceRequest(
            prompt=prompt, sampling=replace(sampling, seed=seed), stop=stop, adapter=adapter
        )
        for prompt in prompts
        for seed in seeds
    )
