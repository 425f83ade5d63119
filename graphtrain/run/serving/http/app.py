"""Routes of the server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan

from graphtrain.run.serving.http.bodies import BodyLimit, read_body
from graphtrain.run.serving.http.chat import chat_chunks, chat_result
from graphtrain.run.serving.http.completions import completion_chunks, completion_result
from graphtrain.run.serving.http.errors import ApiError
from graphtrain.run.serving.http.guard import Guard
from graphtrain.run.serving.http.metrics import ServerMetrics
from graphtrain.run.serving.http.prepare import Prepared, prepare_chat, prepare_completion
from graphtrain.run.serving.http.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_request,
)
from graphtrain.run.serving.http.responses import Answer
from graphtrain.run.serving.http.streams import EventStream, took_too_long, unless_disconnected
from graphtrain.run.serving.http.submission import Sequence, Submission
from graphtrain.run.serving.worker import OpenedModel, Worker

_LARGE_BODIES = 16  # of the largest size, that may be held at the same time
_CLIENT_LEFT = 499  # nginx's status; nobody reads it
_HEALTH = {"ready": 200, "loading": 503, "draining": 503, "stopped": 503, "failed": 500}
_UNCACHED = {"cache-control": "no-store"}


@dataclass(frozen=True, kw_only=True)
class AppSettings:
    """Name that the server answers under, and its limits."""

    model_name: str
    max_body: int = 8_000_000  # bytes
    request_seconds: float = 600.0
    api_key: str | None = None
    only_local: bool = True


@dataclass(frozen=True)
class _Kind:
    """One of the two interfaces to generate text."""

    request: type[GenerationRequest]
    name: str
    prepare: Callable[[Any, OpenedModel, str | None], Prepared]
    result: Callable[[Any, Prepared, list[Sequence], Answer, OpenedModel], dict[str, Any]]
    chunks: Callable[[Any, Prepared, Submission, Answer, OpenedModel], AsyncIterator[Any]]


_COMPLETION = _Kind(
    CompletionRequest, "text_completion", prepare_completion, completion_result, completion_chunks
)
_CHAT = _Kind(ChatRequest, "chat.completion", prepare_chat, chat_result, chat_chunks)


def make_app(
    worker: Worker, settings: AppSettings, lifespan: Lifespan[Any] | None = None
) -> ASGIApp:
    """Return the application of a server.

    Args:
        worker: Thread of the engine.
        settings: Name of the model, and limits.
        lifespan: Entered while the server runs.
    """
    routes = _Routes(worker, settings)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.generating(_COMPLETION), methods=["POST"]),
            Route("/v1/chat/completions", routes.generating(_CHAT), methods=["POST"]),
            Route("/v1/embeddings", routes.embeddings, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _answer_error,
            HTTPException: _answer_http_error,
            Exception: _answer_defect,
        },
        lifespan=lifespan,
    )
    limited = BodyLimit(app, _LARGE_BODIES * settings.max_body)
    return Guard(limited, api_key=settings.api_key, only_local=settings.only_local)


class _Routes:
    def __init__(self, worker: Worker, settings: AppSettings) -> None:
        self._worker, self._settings = worker, settings
        self._metrics = ServerMetrics(worker)
        self._started = int(time.time())
        self._page = (resources.files(__package__ or "") / "page.html").read_text("utf-8")
        self._page_headers = _UNCACHED | {"content-security-policy": _policy(self._page)}

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def health(self, request: Request) -> Response:
        status = self._worker.status
        body = {"status": "ok" if status == "ready" else status}
        return _json(body, _HEALTH[status], _UNCACHED)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self, request: Request) -> Response:
        model = self._opened()
        names = [self._settings.model_name, *model.engine.adapters]
        return _json({"object": "list", "data": [self._describe(name, model) for name in names]})

    async def model(self, request: Request) -> Response:
        model, name = self._opened(), request.path_params["name"]
        self._adapter(name, model)
        return _json(self._describe(name, model))

    async def embeddings(self, request: Request) -> Response:
        raise ApiError(
            404,
            "this server has no embeddings: its model is a causal language model, which was "
            "trained to continue texts and not to compare them",
            code="unsupported_endpoint",
        )

    def generating(self, kind: _Kind) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of an interface, which counts its answers."""

        async def handle(request: Request) -> Any:
            status = 500
            try:
                response = await self._generate(request, kind)
                status = getattr(response, "status_code", 200)
                return response
            except ApiError as error:
                status = error.status
                raise
            finally:
                self._metrics.requests.labels(request.url.path, status).inc()

        return handle

    async def _generate(self, request: Request, kind: _Kind) -> Any:
        model = self._opened()
        try:
            body = await read_body(request, self._settings.max_body)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        parsed = await asyncio.to_thread(parse_request, kind.request, body)
        adapter = self._adapter(parsed.model, model)
        prepared = await asyncio.to_thread(kind.prepare, parsed, model, adapter)
        submission = Submission(self._worker, prepared, self._metrics.observe)
        answer = Answer(kind.name, adapter or self._settings.model_name, model.tokenizer)
        seconds = self._settings.request_seconds
        if parsed.stream:
            chunks = kind.chunks(parsed, prepared, submission, answer, model)
            return EventStream(chunks, seconds, submission.cancel)
        try:
            async with asyncio.timeout(seconds):
                sequences = await unless_disconnected(request.receive, submission.finish())
        except TimeoutError:
            raise took_too_long(seconds) from None
        finally:
            submission.cancel()
        if sequences is None:
            return Response(status_code=_CLIENT_LEFT)
        return _json(kind.result(parsed, prepared, sequences, answer, model))

    def _opened(self) -> OpenedModel:
        """Return the model.

        Raises:
            ApiError: it is being loaded.
        """
        if self._worker.model is None:
            raise ApiError(503, "the model is being loaded; try again in a moment", code="loading")
        return self._worker.model

    def _adapter(self, name: str | None, model: OpenedModel) -> str | None:
        """Return the adapter that a name stands for; None for the base.

        Raises:
            ApiError: there is no model of this name.
        """
        base, adapters = self._settings.model_name, model.engine.adapters
        if name in (None, base):
            return None
        if name not in adapters:
            names = ", ".join(map(repr, (base, *adapters)))
            raise ApiError(
                404,
                f"no model {name[:80]!r}; this server has {names}",
                "model",
                "model_not_found",
            )
        return name

    def _describe(self, name: str, model: OpenedModel) -> dict[str, Any]:
        base = self._settings.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "graphtrain",
            "parent": None if name == base else base,  # vLLM's name
            "max_model_len": model.engine.context_length,  # vLLM's name
            "has_chat_template": model.chat is not None,
        }


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, "application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _answer_defect(request: Request, error: Exception) -> Response:
    return ApiError(500, "a defect in graphtrain; see the log of the server").response()


def _policy(page: str) -> str:
    """Return the policy that lets the page run its own script, and ask its own server, only."""
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
