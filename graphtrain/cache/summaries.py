"""Summaries of stored requests: what a listing of thousands needs, the rest not interpreted."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from graphtrain.cache.layout import Layout, checked
from graphtrain.cache.programs import Unusable, listing
from graphtrain.cache.requests import decode, digests, lines_of, target_name


class Summary(NamedTuple):
    """Enough to list, count and compare; whoever uses an answer reads and checks its request."""

    digest: str
    graph: str
    program: str  # digest
    created: str  # UTC
    parts: Mapping[str, bytes]  # JSON text by name, not interpreted yet

    @property
    def target(self) -> str:
        return _target(self.parts.get("target", b"null"))


def read_summaries(layout: Layout, chosen: Iterable[str] | None = None) -> Iterator[Summary]:
    """Of every request, or of those of the chosen digests; of those not readable, verify tells.

    Raises:
        CacheError: the store cannot be read.
    """
    directory = str(layout.requests)
    for digest in digests(layout.requests, ".json") if chosen is None else map(checked, chosen):
        try:
            with listing(layout.requests), open(f"{directory}/{digest}.json", "rb", 0) as file:
                text = file.read()
            yield summarize(text, digest)
        except Unusable:
            continue  # removed meanwhile, or damaged; either way nothing to list or to compare with


def summarize(text: bytes, digest: str) -> Summary:
    """Of the text of a request's file.

    Raises:
        Unusable: it is damaged, or of another version.
    """
    if b"\n" not in text:  # written before the parts had lines of their own
        request = decode(text, digest)
        parts = {name: json.dumps(part).encode() for name, part in request.parts.items()}
    else:
        head, parts = lines_of(text)
        request = decode(head, digest)
    return Summary(digest, request.graph, request.program, request.created, parts)


def interpret(text: bytes) -> Any:
    """The value of a part; None if it is damaged."""
    try:
        return json.loads(text)
    except ValueError:
        return None


@cache  # the same few among thousands
def _target(text: bytes) -> str:
    return target_name(interpret(text))
