"""Explanation of cache hits and misses: the settings in which stored requests differ."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from graphtrain.cache import programs, stored_requests
from graphtrain.cache.authentication import EntryAuthenticator
from graphtrain.cache.key import ABSENT, CacheKey, Difference, iterate_differences
from graphtrain.cache.layout import StorePaths
from graphtrain.cache.programs import ForeignEntry, UnusableEntry, exists
from graphtrain.cache.stored_requests import StoredRequest, target_name
from graphtrain.cache.summaries import parse_part, read_summaries

_MAX_NEIGHBOURS = 3  # number of neighbours in an explanation
_MAX_VALUE_LENGTH = 60  # characters; longer values are reported only as changed
_TARGET_NAME = (("target",), ("target", "machine"), ("target", "topology"))
_FOREIGN = (
    "not stored here by this user, so it is not loaded; to accept it: graphtrain cache trust DIR"
)
_HASH = re.compile(r"[0-9a-f]{16,}")


@dataclass(frozen=True)
class Neighbour:
    """Stored request of the same graph, with its differences from the explained request."""

    request: str  # digest
    program: str  # digest
    created: str  # UTC
    differences: tuple[Difference, ...]  # mine: explained request, theirs: stored request
    lines: tuple[str, ...]  # readable differences, for example "toolchain: jax 0.10.1 → 0.10.2"

    def to_json(self) -> dict[str, Any]:
        """Return JSON types; the absent side of a difference is omitted."""
        differences = [
            {"path": d.path}
            | {
                side: value
                for side, value in (("mine", d.current), ("theirs", d.stored))
                if value is not ABSENT
            }
            for d in self.differences
        ]
        return {**vars(self), "differences": differences}


@dataclass(frozen=True)
class Explanation:
    """Result of a cache lookup: hit or miss, and for a miss what changed."""

    graph: str
    request: str  # digest
    program: str | None  # digest; None for a miss
    reason: str  # one sentence
    nearest: tuple[Neighbour, ...] = ()  # fewest differences first

    @property
    def hit(self) -> bool:
        """True if the request resolves to a usable program."""
        return self.program is not None

    @property
    def lines(self) -> tuple[str, ...]:
        """Readable differences from the nearest stored request."""
        return self.nearest[0].lines if self.nearest else ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON types."""
        nearest = [neighbour.to_json() for neighbour in self.nearest]
        return {**vars(self), "hit": self.hit, "nearest": nearest}

    def __str__(self) -> str:
        return "\n  ".join([self.reason, *self.lines])


class _Distance(NamedTuple):
    differences: int
    created: str  # UTC
    request: str  # digest


def explain(
    layout: StorePaths, authenticator: EntryAuthenticator, asked: Mapping[str, CacheKey]
) -> dict[str, Explanation]:
    """Look requests up, and compare each missing one with all stored requests of its graph.

    Args:
        layout: paths of the cache.
        authenticator: decides which entries this user may load.
        asked: requests by label: the name of the graph, after its phase or number of hosts.

    Raises:
        CacheError: the cache cannot be read.
    """
    resolved = {graph: _resolve(layout, authenticator, request) for graph, request in asked.items()}
    unknown = {graph: asked[graph] for graph, answer in resolved.items() if answer == (None, "")}
    distances = _distances(layout, unknown) if unknown else {}
    return {
        graph: _explain_missing(layout, graph, request, distances[graph])
        if graph in unknown
        else _explain_stored(graph, request, *resolved[graph])
        for graph, request in asked.items()
    }


def _explain_stored(graph: str, request: CacheKey, program: str | None, reason: str) -> Explanation:
    state = f"is stored: {program}" if program else f"was {reason}"
    return Explanation(graph, request.digest, program, f"the {_graph_phrase(graph)} {state}")


def _explain_missing(
    layout: StorePaths, graph: str, request: CacheKey, distances: list[_Distance]
) -> Explanation:
    digests = [distance.request for distance in distances[:_MAX_NEIGHBOURS]]
    nearest = tuple(_neighbours(layout, request.to_json(), digests))
    reason = f"the cache at {layout.root} contains no {_graph_phrase(graph)}"
    if nearest:
        reason = (
            f"the cache at {layout.root} contains no {_graph_phrase(graph)} with these settings; "
            f"differences from the nearest of {len(distances)} stored ones:"
        )
    return Explanation(graph, request.digest, None, reason, nearest)


def _graph_phrase(graph: str) -> str:
    return f"{graph or 'unnamed'} graph"


def _resolve(
    layout: StorePaths, authenticator: EntryAuthenticator, request: CacheKey
) -> tuple[str | None, str]:
    """Return the program's digest, or None and the reason; an absent request has no reason."""
    path = layout.request(request.digest)
    if not exists(path):
        return None, ""
    try:
        stored = stored_requests.read_asked(path, request)
        if not stored_requests.may_use(authenticator, stored):
            return None, _FOREIGN
        digest = stored.program
    except UnusableEntry as error:
        return None, f"requested before, but the stored request cannot be used: {error}"
    directory = layout.program(digest)
    if not exists(directory):
        return None, f"compiled before, but its program {digest} is no longer stored"
    try:
        programs.check(directory, digest, authenticator, contents=False)
    except ForeignEntry:
        return None, _FOREIGN
    except UnusableEntry as error:
        return None, f"compiled before, but its program {digest} cannot be used: {error}"
    return digest, ""


def _distances(layout: StorePaths, requests: Mapping[str, CacheKey]) -> dict[str, list[_Distance]]:
    """Return the distances to all stored requests of the same graph, fewest differences first."""
    distances: dict[str, list[_Distance]] = {label: [] for label in requests}
    count = {label: _difference_counter(request.to_json()) for label, request in requests.items()}
    labels: dict[str, list[str]] = {}  # by graph: of each phase and each number of hosts
    for label, request in requests.items():
        for graph in {label, str(request.part("graph") or label)}:
            labels.setdefault(graph, []).append(label)
    for stored in read_summaries(layout):
        for label in labels.get(stored.graph, ()):
            if stored.digest != requests[label].digest:
                differences = count[label](stored.parts)
                distances[label].append(_Distance(differences, stored.created, stored.digest))
    for graph_distances in distances.values():
        graph_distances.sort(key=attrgetter("created"), reverse=True)
        graph_distances.sort(
            key=attrgetter("differences")
        )  # stable sort: among equals the newest comes first
    return distances


def _difference_counter(requested: Mapping[str, Any]) -> Callable[[Mapping[str, bytes]], int]:
    """Return a function that counts differences from `requested`, with results cached per part."""

    @cache
    def in_names(names: tuple[str, ...]) -> int:
        return sum(1 for _ in iterate_differences(dict.fromkeys(requested), dict.fromkeys(names)))

    @cache
    def in_part(name: str, text: bytes) -> int:
        try:
            return sum(1 for _ in iterate_differences(requested[name], parse_part(text)))
        except RecursionError:  # nested too deeply to be a key of ours
            return 1

    def count(parts: Mapping[str, bytes]) -> int:
        common = ((name, text) for name, text in parts.items() if name in requested)
        return in_names(tuple(parts)) + sum(in_part(name, text) for name, text in common)

    return count


def _neighbours(
    layout: StorePaths, requested: Mapping[str, Any], digests: Iterable[str]
) -> Iterator[Neighbour]:
    for digest in digests:
        with suppress(
            UnusableEntry, RecursionError
        ):  # removed or damaged since the distances were computed
            yield _neighbour(requested, stored_requests.read(layout.request(digest)))


def _neighbour(requested: Mapping[str, Any], stored: StoredRequest) -> Neighbour:
    differences = tuple(iterate_differences(requested, stored.parts))
    return Neighbour(
        stored.digest,
        stored.program,
        stored.created,
        differences,
        tuple(render(differences, requested, stored.parts)),
    )


def render(
    differences: Sequence[Difference], mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[str]:
    """Return one line per difference, from the stored value to the requested one.

    Differences in machine and topology are merged into one line in target notation (cpu:8).
    """
    names = target_name(theirs.get("target")), target_name(mine.get("target"))
    if names[0] == names[1]:
        return [_line(difference) for difference in differences]
    lines = [_line(difference) for difference in differences if difference.path not in _TARGET_NAME]
    return [f"target: {names[0]} → {names[1]}", *lines]


def _line(difference: Difference) -> str:
    part, *leaf = difference.path or ("parts",)
    if part == "sources" and leaf:
        return f"source of {'/'.join(leaf)} {_event(difference)}"
    subject = " ".join(leaf if part == "program" and leaf else [part, *leaf])
    if part == "toolchain" and leaf:
        subject = f"toolchain: {' '.join(leaf[1:] or leaf)}"
    stored, current = _shown(difference.stored), _shown(difference.current)
    if _is_unreadable(stored) or _is_unreadable(current):
        return f"{subject} {_event(difference)}"
    return f"{subject}{' ' if part == 'toolchain' else ': '}{stored} → {current}"


def _event(difference: Difference) -> str:
    if difference.stored is ABSENT:
        return "added"
    return "removed" if difference.current is ABSENT else "changed"


def _shown(value: object) -> str:
    if value is ABSENT:
        return "absent"
    plain_text = isinstance(value, str) and value
    return str(value) if plain_text else json.dumps(value, ensure_ascii=False)


def _is_unreadable(text: str) -> bool:
    return len(text) > _MAX_VALUE_LENGTH or _HASH.fullmatch(text) is not None
