"""Explanation: why a request finds its program or none, in lines that a person can act on."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from graphtrain.cache import programs, requests
from graphtrain.cache.layout import Layout
from graphtrain.cache.programs import Unusable, is_present
from graphtrain.cache.requests import Request, target_name
from graphtrain.key import ABSENT, CacheKey, Difference, compare

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


def explain(layout: Layout, request: CacheKey, graph: str) -> Explanation:
    """Look the request up, then compare it with every stored request of its graph.

    Raises:
        CacheError: the store cannot be read.
    """
    named = f"{graph or 'unnamed'} graph"
    program, reason = _answer(layout, request)
    if reason:
        return Explanation(graph, request.digest, None, f"the {named} was {reason}")
    if program:
        return Explanation(graph, request.digest, program, f"the {named} is stored: {program}")
    nearest, count = _nearest(layout, request, graph)
    reason = f"the cache at {layout.root} holds no {named} at all"
    if nearest:
        reason = (
            f"the cache at {layout.root} holds no {named} for this; "
            f"changed since the nearest of {count} that it holds:"
        )
    return Explanation(graph, request.digest, None, reason, nearest)


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


def _nearest(layout: Layout, request: CacheKey, graph: str) -> tuple[tuple[Neighbour, ...], int]:
    """The stored requests with the fewest differences, and how many there are of the graph."""
    mine = request.to_json()
    counted = [
        (sum(1 for _ in compare(mine, stored.parts)), stored.created, stored.digest)
        for stored in requests.read_all(layout)
        if stored.graph == graph and stored.digest != request.digest
    ]
    counted.sort(key=itemgetter(1), reverse=True)
    counted.sort(key=itemgetter(0))  # stable: of equally near ones the newest is first
    nearest = requests.read_all(layout, [digest for _, _, digest in counted[:_SHOWN]])
    return tuple(_neighbour(mine, stored) for stored in nearest), len(counted)


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
