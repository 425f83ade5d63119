"""Explanation: why a request finds its program or none, in lines that a person can act on."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from graphtrain.cache import programs, requests
from graphtrain.cache.key import ABSENT, CacheKey, Difference, compare
from graphtrain.cache.layout import Layout
from graphtrain.cache.programs import Unusable, is_present
from graphtrain.cache.requests import Request, target_name
from graphtrain.cache.summaries import interpret, read_summaries

_SHOWN = 3  # neighbours
_LONGEST = 60  # characters of a value worth reading
_TARGET_NAME = (("target",), ("target", "machine"), ("target", "topology"))
_HASH = re.compile(r"[0-9a-f]{16,}")


@dataclass(frozen=True)
class Neighbour:
    """A stored request that was asked for something else, and what that was."""

    request: str  # digest
    program: str  # digest
    created: str  # UTC
    differences: tuple[Difference, ...]  # mine is what is asked for now, theirs what is stored
    lines: tuple[str, ...]  # the differences to read, as "toolchain: jax 0.10.1 → 0.10.2"

    def to_json(self) -> dict[str, Any]:
        """For programs; of a difference, a side that is absent is left out."""
        differences = [
            {"path": d.path}
            | {
                side: value
                for side, value in (("mine", d.mine), ("theirs", d.theirs))
                if value is not ABSENT
            }
            for d in self.differences
        ]
        return {**vars(self), "differences": differences}


@dataclass(frozen=True)
class Explanation:
    """The answer to: would this request be found, and if not, what changed?"""

    graph: str
    request: str  # digest
    program: str | None  # digest; None if the request finds no program
    reason: str  # one sentence
    nearest: tuple[Neighbour, ...] = ()  # fewest differences first

    @property
    def hit(self) -> bool:
        return self.program is not None

    @property
    def lines(self) -> tuple[str, ...]:
        """What changed since the nearest stored request."""
        return self.nearest[0].lines if self.nearest else ()

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        nearest = [neighbour.to_json() for neighbour in self.nearest]
        return {**vars(self), "hit": self.hit, "nearest": nearest}

    def __str__(self) -> str:
        return "\n  ".join([self.reason, *self.lines])


class _Distance(NamedTuple):
    differences: int
    created: str  # UTC
    request: str  # digest


def explain(layout: Layout, asked: Mapping[str, CacheKey]) -> dict[str, Explanation]:
    """Look requests up; compare those that are not stored with every one of their graph that is.

    Args:
        layout: the store's.
        asked: requests by graph.

    Raises:
        CacheError: the store cannot be read.
    """
    answers = {graph: _answer(layout, request) for graph, request in asked.items()}
    unknown = {graph: asked[graph] for graph, answer in answers.items() if answer == (None, "")}
    distances = _distances(layout, unknown) if unknown else {}
    return {
        graph: _unknown(layout, graph, request, distances[graph])
        if graph in unknown
        else _known(graph, request, *answers[graph])
        for graph, request in asked.items()
    }


def _known(graph: str, request: CacheKey, program: str | None, reason: str) -> Explanation:
    said = f"is stored: {program}" if program else f"was {reason}"
    return Explanation(graph, request.digest, program, f"the {_named(graph)} {said}")


def _unknown(
    layout: Layout, graph: str, request: CacheKey, distances: list[_Distance]
) -> Explanation:
    digests = [distance.request for distance in distances[:_SHOWN]]
    nearest = tuple(_neighbours(layout, request.to_json(), digests))
    reason = f"the cache at {layout.root} holds no {_named(graph)} at all"
    if nearest:
        reason = (
            f"the cache at {layout.root} holds no {_named(graph)} for this; "
            f"changed since the nearest of {len(distances)} that it holds:"
        )
    return Explanation(graph, request.digest, None, reason, nearest)


def _named(graph: str) -> str:
    return f"{graph or 'unnamed'} graph"


def _answer(layout: Layout, request: CacheKey) -> tuple[str | None, str]:
    """The program's digest, or why there is none although the request is stored."""
    path = layout.request(request.digest)
    if not is_present(path):
        return None, ""
    try:
        digest = requests.read(path).program
    except Unusable as error:
        return None, f"asked for before, but that cannot be read: {error}"
    directory = layout.program(digest)
    if not is_present(directory):
        return None, f"compiled before, but its program {digest} is not stored any more"
    try:
        programs.check(directory, digest, contents=False)
    except Unusable as error:
        return None, f"compiled before, but its program {digest} cannot be used: {error}"
    return digest, ""


def _distances(layout: Layout, asked: Mapping[str, CacheKey]) -> dict[str, list[_Distance]]:
    """Of every stored request of the graphs asked for, fewest differences first."""
    found: dict[str, list[_Distance]] = {graph: [] for graph in asked}
    count = {graph: _counter(request.to_json()) for graph, request in asked.items()}
    for stored in read_summaries(layout):
        if stored.graph in found and stored.digest != asked[stored.graph].digest:
            differences = count[stored.graph](stored.parts)
            found[stored.graph].append(_Distance(differences, stored.created, stored.digest))
    for of_graph in found.values():
        of_graph.sort(key=attrgetter("created"), reverse=True)
        of_graph.sort(key=attrgetter("differences"))  # stable: of equal ones the newest is first
    return found


def _counter(mine: Mapping[str, Any]) -> Callable[[Mapping[str, bytes]], int]:
    """Counts the differences from a key; parts that thousands have in common are compared once."""

    @cache
    def in_names(names: tuple[str, ...]) -> int:
        return sum(1 for _ in compare(dict.fromkeys(mine), dict.fromkeys(names)))

    @cache
    def in_part(name: str, text: bytes) -> int:
        return sum(1 for _ in compare(mine[name], interpret(text)))

    def count(parts: Mapping[str, bytes]) -> int:
        common = ((name, text) for name, text in parts.items() if name in mine)
        return in_names(tuple(parts)) + sum(in_part(name, text) for name, text in common)

    return count


def _neighbours(
    layout: Layout, mine: Mapping[str, Any], digests: Iterable[str]
) -> Iterator[Neighbour]:
    for digest in digests:
        with suppress(Unusable):  # removed or damaged since it was counted
            yield _neighbour(mine, requests.read(layout.request(digest)))


def _neighbour(mine: Mapping[str, Any], stored: Request) -> Neighbour:
    differences = tuple(compare(mine, stored.parts))
    return Neighbour(
        stored.digest,
        stored.program,
        stored.created,
        differences,
        tuple(render(differences, mine, stored.parts)),
    )


def render(
    differences: Sequence[Difference], mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[str]:
    """One line for each difference, from what is stored to what is asked for.

    The leaves of a target's name are one line, as people write it.
    """
    names = target_name(theirs.get("target")), target_name(mine.get("target"))
    if names[0] == names[1]:
        return [_line(difference) for difference in differences]
    rest = [_line(difference) for difference in differences if difference.path not in _TARGET_NAME]
    return [f"target: {names[0]} → {names[1]}", *rest]


def _line(difference: Difference) -> str:
    part, *leaf = difference.path or ("parts",)
    if part == "sources" and leaf:
        return f"source of {'/'.join(leaf)} {_event(difference)}"
    subject = " ".join(leaf if part == "program" and leaf else [part, *leaf])
    if part == "toolchain" and leaf:
        subject = f"toolchain: {' '.join(leaf[1:] or leaf)}"
    old, new = _shown(difference.theirs), _shown(difference.mine)
    if _is_unreadable(old) or _is_unreadable(new):
        return f"{subject} {_event(difference)}"
    return f"{subject}{' ' if part == 'toolchain' else ': '}{old} → {new}"


def _event(difference: Difference) -> str:
    if difference.theirs is ABSENT:
        return "added"
    return "removed" if difference.mine is ABSENT else "changed"


def _shown(value: object) -> str:
    if value is ABSENT:
        return "absent"
    plain_text = isinstance(value, str) and value
    return str(value) if plain_text else json.dumps(value, ensure_ascii=False)


def _is_unreadable(text: str) -> bool:
    return len(text) > _LONGEST or _HASH.fullmatch(text) is not None
