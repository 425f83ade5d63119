"""Checks of a request before its body is read: host, API key, type of the body."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from graphtrain.run.serving.http.errors import ApiError


class Guard:
    """Application that refuses what is not allowed, and passes on the rest.

    Args:
        app: Application behind it.
        api_key: Key that requests under /v1 must have; None: none.
        only_local: Whether the Host header must name this machine, as it does unless a web page
            reaches the server under a name of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, only_local: bool) -> None:
        self._app, self._only_local = app, only_local
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        headers = request.headers
        if self._only_local and not is_local(_host(headers)):
            raise ApiError(
                421, "this server answers requests to localhost only; start it with --host"
            )
        is_api = request.url.path.startswith("/v1/")
        if is_api and self._expected is not None:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page of another origin can send other types without asking the server first.
        if request.method == "POST" and content_type != "application/json":
            raise ApiError(415, "the Content-Type must be application/json")


def is_local(host: str) -> bool:
    """Return whether a host is a name or an address of this machine for itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _host(headers: Mapping[str, str]) -> str:
    host = headers.get("host", "")
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
