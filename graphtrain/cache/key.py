"""CacheKey: what must be equal for two programs to be equal."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from lowering.artifact import JSON

DIGEST_LENGTH = 40  # hex digits, 160 bits: no two keys will ever collide, and a path stays readable


class Absent(Enum):
    """The value of a leaf that one of two keys does not have; null is a value."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Difference:
    """One leaf in which two keys differ."""

    path: tuple[str, ...]  # part first: ("toolchain", "versions", "jax")
    mine: JSON | Absent
    theirs: JSON | Absent


@dataclass(frozen=True)
class CacheKey:
    """Named ingredients in a fixed order; equal keys promise equal programs.

    The ingredients are kept whole, as JSON text, so that a miss can be explained leaf by leaf.
    Text also keeps apart what Python calls equal: 1, 1.0 and true, and mappings in another order.
    """

    parts: tuple[tuple[str, str], ...]  # name, JSON text

    @classmethod
    def of(cls, /, **parts: object) -> "CacheKey":
        """Take each part whole, so that a field added later is never forgotten.

        Raises:
            TypeError: a value is not JSON, as NaN, a path or a set; the message says where it is.
        """
        return cls(tuple((name, _text(plain(value, name))) for name, value in parts.items()))

    @cached_property
    def digest(self) -> str:
        """Hexadecimal, the same in every process and on every machine."""
        return hashlib.sha256(_text(self.parts).encode()).hexdigest()[:DIGEST_LENGTH]

    def part(self, name: str) -> Any:
        """The value of a part as JSON types; None where there is no such part."""
        text = dict(self.parts).get(name)
        return None if text is None else json.loads(text)

    def differences(self, other: "CacheKey") -> list[Difference]:
        """Every leaf that differs from other; empty only if the keys are equal."""
        return list(compare(self.to_json(), other.to_json()))

    def to_json(self) -> dict[str, Any]:
        """The parts as JSON types, in order; from_json gives back an equal key."""
        return {name: json.loads(text) for name, text in self.parts}

    @classmethod
    def from_json(cls, parts: Mapping[str, Any]) -> "CacheKey":
        """The key whose to_json gave parts.

        Raises:
            TypeError: a value is not JSON.
        """
        return cls.of(**parts)


def plain(value: object, where: str) -> JSON:
    """value in JSON types: dataclasses by field, tuples as lists, mappings in their own order.

    Raises:
        TypeError: value, or something in it, is not JSON; where names it in the message.
    """
    if value is None or isinstance(value, str | int) or _is_finite(value):
        return value  # bool is an int
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_name(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{where}: {value!r} is not JSON; use str, int, finite float, bool, list, dict")


def compare(mine: Any, theirs: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """The leaves in which two values of JSON types differ.

    Lists are leaves, unless they are as long as each other and hold mappings.
    """
    if repr(mine) == repr(theirs):  # tells 1 from 1.0 and sees order, where == does not
        return
    if isinstance(mine, dict) and isinstance(theirs, dict):
        yield from _compare_mappings(mine, theirs, path)
    elif _both_hold_mappings(mine, theirs):
        for index, (item, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from compare(item, other, (*path, str(index)))
    else:
        yield Difference(path, mine, theirs)


def _compare_mappings(mine: dict, theirs: dict, path: tuple[str, ...]) -> Iterator[Difference]:
    for name in mine | theirs:
        if name in mine and name in theirs:
            yield from compare(mine[name], theirs[name], (*path, name))
        else:
            yield Difference((*path, name), mine.get(name, ABSENT), theirs.get(name, ABSENT))
    my_order = [name for name in mine if name in theirs]
    their_order = [name for name in theirs if name in mine]
    if my_order != their_order:
        yield Difference(path, my_order, their_order)


def _both_hold_mappings(mine: Any, theirs: Any) -> bool:
    if not (isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs)):
        return False
    return any(isinstance(item, dict) for item in mine + theirs)


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _name(key: object, where: str) -> str:
    # JSON would write 1 and "1" as the same name, and two keys would meet
    if not isinstance(key, str):
        raise TypeError(f"{where}: the name {key!r} is not a string")
    return key


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))  # unsorted: the order of mesh axes is meaning
