"""Summaries of stored requests, with parts left unparsed, for fast listing of thousands."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from graphtrain.cache.layout import StorePaths, validate_digest
from graphtrain.cache.programs import UnusableEntry, list_errors, read_bytes
from graphtrain.cache.stored_requests import Origin, decode, list_digests, split_parts, target_name


class RequestSummary(NamedTuple):
    """Request fields for listing, counting and comparing, without verification of its digest."""

    digest: str
    graph: str
    program: str  # digest
    created: str  # UTC
    parts: Mapping[str, bytes]  # JSON text by name, not parsed
    code: str  # message authentication code of the user who stored it; may be empty
    origin: Origin

    @property
    def target(self) -> str:
        return _target(self.parts.get("target", b"null"))


def read_summaries(
    layout: StorePaths, chosen: Iterable[str] | None = None
) -> Iterator[RequestSummary]:
    """Yield the summary of every request, or of the chosen digests; skip unusable files.

    Raises:
        CacheError: the cache cannot be read.
    """
    directory = str(layout.requests)
    for digest in (
        list_digests(layout.requests, ".json") if chosen is None else map(validate_digest, chosen)
    ):
        try:
            with list_errors(layout.requests):
                text = read_bytes(f"{directory}/{digest}.json")
            yield summarize(text, digest)
        except UnusableEntry:
            continue  # removed meanwhile, or damaged, which `verify` reports


def summarize(text: bytes, digest: str) -> RequestSummary:
    """Summarize the contents of a request file.

    Raises:
        UnusableEntry: the contents are damaged, or of another version.
    """
    if b"\n" not in text:  # older format: the parts are not on separate lines
        request = decode(text, digest)
        parts = {
            name: json.dumps(part, separators=(",", ":")).encode()  # as in a file with lines
            for name, part in request.parts.items()
        }
    else:
        head, parts = split_parts(text)
        request = decode(head, digest)
    return RequestSummary(
        digest,
        request.graph,
        request.program,
        request.created,
        parts,
        request.code,
        request.origin,
    )


def parse_part(text: bytes) -> Any:
    """Return the parsed value of a part; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@cache  # thousands of requests share a few targets
def _target(text: bytes) -> str:
    try:
        return target_name(parse_part(text))
    except RecursionError:  # nested almost too deeply to parse
        return ""
