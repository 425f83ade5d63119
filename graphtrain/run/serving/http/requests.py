"""Requests of OpenAI's interface, checked: types, ranges, and what is not supported.

Fields beyond OpenAI's are those of vLLM, under its names: top_k, min_p, repetition_penalty,
stop_token_ids, ignore_eos.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from graphtrain.config.schema.serve import TOP_LOG_PROBS
from graphtrain.run.serving.http.errors import ApiError

_MAX_STOP = 16  # strings
_MAX_STOP_LENGTH = 256  # characters
_MAX_BIASES = 300  # OpenAI's limit
_MAX_CHOICES = 128  # OpenAI's limit of n

Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=_MAX_CHOICES)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # pads the events of OpenAI's servers; nothing is padded here


class GenerationRequest(BaseModel):
    """Fields that completions and chat completions share."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None
    n: Count = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0
    min_p: Probability = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_MAX_BIASES)
    ] = {}
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOP, fail_fast=True)] = []
    stop_token_ids: Annotated[Tokens, Field(max_length=_MAX_STOP)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    # What OpenAI's servers do with these has no meaning here.
    metadata: dict[str, Any] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool = False
    user: str | None = None


class CompletionRequest(GenerationRequest):
    """Request of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOG_PROBS)] | None = None
    best_of: Count | None = None
    suffix: Literal[""] = ""  # text after the gap: for models that fill gaps


class ChatRequest(GenerationRequest):
    """Request of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOG_PROBS)] = 0
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[Literal["type"], Literal["text"]] = {"type": "text"}


Request = TypeVar("Request", bound=GenerationRequest)

# Errors of fields that have several forms, of which the first problem names only one.
_FORMS = {
    "prompt": "prompt must be a string, a list of strings, a list of token ids, or a list of such "
    "lists, and not empty",
    "stop": f"stop must be a string or a list of at most {_MAX_STOP} strings, each of 1 to "
    f"{_MAX_STOP_LENGTH} characters; leave it out to stop nowhere",
}


def parse_request(kind: type[Request], body: bytes) -> Request:
    """Parse the body of a request; null stands for the default of a field.

    Raises:
        ApiError: it is not valid; the message names one problem.
    """
    fields = _parsed(body)
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    for name in fields:
        if name not in kind.model_fields:
            raise ApiError(400, f"unknown field {name[:80]!r}", name[:80], "unknown_parameter")
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _api_error(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    _check_together(request)
    return request


def _parsed(body: bytes) -> Any:
    """Parse JSON in which no object has a key twice, of which others than the last would be lost.

    Raises:
        ApiError: the body is not JSON, or repeats a key.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
        # It checks syntax and depth, and passes over repeated keys; json shows them to the hook.
        json.loads(body.decode(), object_pairs_hook=_check_keys)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    return fields


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            name = key[:80]
            raise ApiError(400, f"key {name!r} is repeated; write it once", name, "duplicate_key")
        seen.add(key)


def _api_error(error: ValidationError) -> ApiError:
    """Return the first problem."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(problem["loc"][0])
    if name in _FORMS:
        return ApiError(400, _FORMS[name], name)
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {path[:80]!r}", name, "unknown_parameter")
    return ApiError(400, f"{path[:200]}: {problem['msg']}", name)


def _check_limits(request: ChatRequest) -> None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            400,
            f"max_tokens = {old} and max_completion_tokens = {new} are the same limit; leave one "
            "of them out",
            "max_tokens",
        )


def _check_together(request: GenerationRequest) -> None:
    """Check fields against each other.

    Raises:
        ApiError: they contradict each other.
    """
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream = true", "stream_options")
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs = true", "top_logprobs")
        _check_limits(request)
        return
    assert isinstance(request, CompletionRequest)
    best_of = request.best_of or request.n
    if best_of < request.n:
        raise ApiError(400, f"best_of = {best_of} is less than n = {request.n}", "best_of")
    if best_of > request.n and request.stream:
        raise ApiError(400, "best_of above n cannot be streamed", "best_of")
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens = 0 generates nothing; it needs echo = true", "max_tokens")
