"""Errors as OpenAI's interface has them."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_RETRY_SECONDS = "1"
_BODY_UNREAD = (401, 408, 413, 415, 421, 503)  # the rest of the body need not be sent


class ApiError(Exception):
    """Error that is the answer to a request.

    Args:
        status: HTTP status.
        message: What is wrong and what to do.
        param: Field of the request that is wrong.
        code: Word for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the object that clients of OpenAI read."""
        error = {
            "message": self.message,
            "type": _type(self.status),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the answer to the request."""
        headers = {}
        if self.status in (429, 503):
            headers["retry-after"] = _RETRY_SECONDS
        if self.status in _BODY_UNREAD:
            headers["connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
