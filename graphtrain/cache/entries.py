"""What a store holds, as listed: programs joined with the requests they answer."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphtrain.cache.layout import Layout
from graphtrain.cache.programs import PAYLOAD, RECORD, Unusable, listing, read_record
from graphtrain.cache.requests import digests, target_name
from graphtrain.cache.summaries import read_summaries
from graphtrain.errors import CacheError


@dataclass(frozen=True)
class Entry:
    """One stored program."""

    program: str  # digest
    requests: tuple[str, ...]  # digests
    graph: str
    target: str
    nbytes: int
    created: str  # UTC
    last_used: float  # seconds since 1970


class _Asked(NamedTuple):
    """What a listing needs of a request; thousands with all their parts take seconds to collect."""

    created: str
    digest: str
    graph: str
    target: str


def list_entries(layout: Layout) -> list[Entry]:
    """Every stored program, last used first."""
    requests: dict[str, list[_Asked]] = defaultdict(list)
    for request in read_summaries(layout):
        asked = _Asked(request.created, request.digest, request.graph, request.target)
        requests[request.program].append(asked)
    entries = _entries(layout, requests)
    return sorted(entries, key=lambda entry: (-entry.last_used, entry.program))


def resolve(layout: Layout, prefix: str) -> str:
    """The program or request whose digest starts with prefix; of a request, its program.

    Raises:
        CacheError: none or several do.
    """
    found = {digest for digest in digests(layout.programs) if digest.startswith(prefix)}
    if not found:
        named = [name for name in digests(layout.requests, ".json") if name.startswith(prefix)]
        found = {request.program for request in read_summaries(layout, named)}
    if len(found) == 1:
        return found.pop()
    if found:
        shown = ", ".join(sorted(found)[:3])
        raise CacheError(f"{prefix} is the start of {len(found)} digests ({shown} ...); give more")
    raise CacheError(f"{layout.root} holds no program or request whose digest starts with {prefix}")


def describe(layout: Layout, digest: str) -> dict[str, Any]:
    """The record of a program with its digest and requests.

    Raises:
        CacheError: it is missing, damaged, or of another version.
    """
    try:
        body = read_record(layout.program(digest), digest)
    except Unusable as error:
        raise CacheError(f"{layout.program(digest)} cannot be used: {error}") from error
    answered = [request for request in read_summaries(layout) if request.program == digest]
    named = [{"digest": r.digest, "graph": r.graph, "created": r.created} for r in answered]
    return {"program": digest, "requests": named, **body}


def _entries(layout: Layout, requests: dict[str, list[_Asked]]) -> Iterator[Entry]:
    programs = str(layout.programs)
    for digest in digests(layout.programs):
        directory = f"{programs}/{digest}"  # a Path costs as much as the two stats
        try:
            with listing(layout.programs):
                payload = os.stat(f"{directory}/{PAYLOAD}")
                nbytes = payload.st_size + os.stat(f"{directory}/{RECORD}").st_size
            graph, target, created = _facts(layout, digest, requests.get(digest, []))
        except Unusable:
            continue  # removed meanwhile, or damaged: verify tells
        names = tuple(request.digest for request in requests.get(digest, []))
        yield Entry(digest, names, graph, target, nbytes, created, payload.st_mtime)


def _facts(layout: Layout, digest: str, requests: list[_Asked]) -> tuple[str, str, str]:
    """Graph, target and time; from a request where there is one, since records are large."""
    if requests:
        first = min(requests)
        return first.graph, first.target, first.created
    body = read_record(layout.program(digest), digest)
    graph = str(body["record"].get("graph", ""))
    return graph, target_name(body["key"].get("target")), body["created"]
