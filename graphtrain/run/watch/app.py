"""Routes of the page: its files, and what is new of the runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan

from graphtrain.planning.page import vega_lite
from graphtrain.run.goodput.activities import BUCKETS
from graphtrain.run.goodput.page import COLORS
from graphtrain.run.metrics import METRICS
from graphtrain.run.serving.http.guard import Guard
from graphtrain.run.watch.watched_run import Known, WatchedRun

# The page runs its own scripts, and asks its own server, only.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
}


def make_app(
    runs: Sequence[WatchedRun], *, only_local: bool, lifespan: Lifespan[Any] | None = None
) -> ASGIApp:
    """Return the application.

    Args:
        runs: Runs on the page.
        only_local: Whether requests must name this machine in their Host header.
        lifespan: Entered while the server runs.
    """

    def data(request: Request) -> Response:
        known = _known(request.query_params.get("known", ""), len(runs))
        answers = [run.answer(one) for run, one in zip(runs, known, strict=True)]
        return Response(json.dumps({"runs": answers}), 200, _HEADERS, "application/json")

    def names(request: Request) -> Response:
        body = {"metrics": METRICS, "buckets": BUCKETS, "colors": COLORS}
        return Response(json.dumps(body), 200, _HEADERS, "application/json")

    app = Starlette(
        routes=[
            Route("/", _file("page.html", "text/html")),
            Route("/page.js", _file("page.js", "text/javascript")),
            Route("/charts.js", _charts),
            Route("/names", names),
            Route("/data", data),
        ],
        lifespan=lifespan,
    )
    return Guard(app, api_key=None, only_local=only_local)


def _file(name: str, media_type: str) -> Any:
    text = (resources.files(__package__ or "") / name).read_text("utf-8")
    return lambda request: Response(text, 200, _HEADERS, media_type)


def _charts(request: Request) -> Response:
    return Response(_vega_lite(), 200, _HEADERS, "text/javascript")


@cache
def _vega_lite() -> str:
    return vega_lite()


def _known(text: str, count: int) -> list[Known]:
    """Return what the page has of each run, as "CURVES:SEQUENCE:FACTS,..."; nothing if unclear."""
    parts = [part.split(":") for part in text.split(",")]
    if len(parts) != count or any(len(part) != 3 or not part[1].isdigit() for part in parts):
        return [Known()] * count
    return [Known(curves, int(sequence[:18]), facts) for curves, sequence, facts in parts]
