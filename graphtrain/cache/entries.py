"""Cache listing: stored programs joined with the requests that resolve to them."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from graphtrain.cache.descriptions import SettingsText, describe_settings, settings_text
from graphtrain.cache.layout import StorePaths
from graphtrain.cache.programs import PAYLOAD, RECORD, UnusableEntry, list_errors, read_record
from graphtrain.cache.stored_requests import Origin, list_digests, target_name
from graphtrain.cache.summaries import RequestSummary, read_summaries
from graphtrain.errors import CacheError


@dataclass(frozen=True)
class CacheEntry:
    """One stored program."""

    program: str  # digest
    requests: tuple[str, ...]  # digests
    graph: str
    target: str
    nbytes: int
    created: str  # UTC
    last_used: float  # seconds since 1970
    origin: Origin  # who compiled it first
    settings: SettingsText  # of that configuration


class _RequestFields(NamedTuple):
    """Fields of a request for a listing; the parts of its settings are not parsed."""

    created: str
    digest: str
    graph: str
    target: str
    origin: Origin
    settings: SettingsText


def list_entries(layout: StorePaths) -> list[CacheEntry]:
    """Return all stored programs, most recently used first."""
    requests: dict[str, list[_RequestFields]] = defaultdict(list)
    for request in read_summaries(layout):
        requests[request.program].append(_listing_fields(request))
    entries = _entries(layout, requests)
    return sorted(entries, key=lambda entry: (-entry.last_used, entry.program))


def resolve(layout: StorePaths, prefix: str) -> str:
    """Return the program whose digest, or whose request's digest, starts with `prefix`.

    Raises:
        CacheError: no digest or several start with it.
    """
    programs = {digest for digest in list_digests(layout.programs) if digest.startswith(prefix)}
    if not programs:
        request_digests = [
            name for name in list_digests(layout.requests, ".json") if name.startswith(prefix)
        ]
        programs = {request.program for request in read_summaries(layout, request_digests)}
    if len(programs) == 1:
        return programs.pop()
    if programs:
        examples = ", ".join(sorted(programs)[:3])
        raise CacheError(
            f"{prefix} matches {len(programs)} digests ({examples} ...); give a longer prefix"
        )
    raise CacheError(
        f"{layout.root} contains no program or request whose digest starts with {prefix}"
    )


def describe(layout: StorePaths, digest: str) -> dict[str, Any]:
    """Return the record of a program, with its digest and requests added.

    Raises:
        CacheError: the record is missing, damaged, or of another version.
    """
    try:
        body = read_record(layout.program(digest), digest)
    except UnusableEntry as error:
        raise CacheError(f"{layout.program(digest)} cannot be used: {error}") from error
    answered = [request for request in read_summaries(layout) if request.program == digest]
    return {"program": digest, "requests": [_request_facts(one) for one in answered], **body}


def _request_facts(request: RequestSummary) -> dict[str, Any]:
    settings = settings_text(request.parts)
    return {
        "digest": request.digest,
        "graph": request.graph,
        "created": request.created,
        **vars(request.origin),
        "settings": vars(describe_settings(settings)),
    }


def _listing_fields(request: RequestSummary) -> _RequestFields:
    return _RequestFields(
        request.created,
        request.digest,
        request.graph,
        request.target,
        request.origin,
        settings_text(request.parts),
    )


def _entries(layout: StorePaths, requests: dict[str, list[_RequestFields]]) -> Iterator[CacheEntry]:
    programs = str(layout.programs)
    for digest in list_digests(layout.programs):
        # A string, because creating a Path costs as much as the two stat calls.
        directory = f"{programs}/{digest}"
        try:
            with list_errors(layout.programs):
                payload = os.stat(f"{directory}/{PAYLOAD}")
                nbytes = payload.st_size + os.stat(f"{directory}/{RECORD}").st_size
            first = _first_request(layout, digest, requests.get(digest, []))
        except UnusableEntry:
            continue  # removed meanwhile, or damaged, which `verify` reports
        names = tuple(request.digest for request in requests.get(digest, []))
        yield CacheEntry(
            digest,
            names,
            first.graph,
            first.target,
            nbytes,
            first.created,
            payload.st_mtime,
            first.origin,
            first.settings,
        )


def _first_request(
    layout: StorePaths, digest: str, requests: list[_RequestFields]
) -> _RequestFields:
    """Return the earliest request of a program; without one, what its record, which is large, has.

    Raises:
        UnusableEntry: there is no request, and the record is damaged.
    """
    if requests:
        return min(requests, key=itemgetter(0, 1))
    body = read_record(layout.program(digest), digest)
    graph, target = str(body["record"].get("graph", "")), target_name(body["key"].get("target"))
    return _RequestFields(body["created"], "", graph, target, Origin(), SettingsText())
