"""CacheKey: the inputs that determine a compiled program."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from lowering.artifact import JSON

DIGEST_LENGTH = 40  # hex digits, 160 bits: no collisions in practice, and short paths


class Absent(Enum):
    """Marker for a leaf that one of two keys lacks; null is a value."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Difference:
    """Leaf in which two keys differ."""

    path: tuple[str, ...]  # begins with the part: ("toolchain", "versions", "jax")
    current: JSON | Absent
    stored: JSON | Absent


@dataclass(frozen=True)
class CacheKey:
    """Named parts in a fixed order; equal keys guarantee equal programs.

    Parts are stored in full as JSON text, so that a cache miss can be explained leaf by leaf. Text
    also distinguishes values that are equal in Python: 1, 1.0 and True, and mappings with another
    order.
    """

    parts: tuple[tuple[str, str], ...]  # name, JSON text

    @classmethod
    def of(cls, /, **parts: object) -> "CacheKey":
        """Create a key from complete values, so that fields added later are always included.

        Raises:
            TypeError: a value is not JSON, for example NaN, a path or a set; the message contains
                its position.
        """
        return cls(
            tuple((name, _text(to_json_types(value, name))) for name, value in parts.items())
        )

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the parts, equal in every process and on every machine."""
        return hashlib.sha256(_text(self.parts).encode()).hexdigest()[:DIGEST_LENGTH]

    def part(self, name: str) -> Any:
        """Return the value of a part as JSON types, or None if there is no such part."""
        text = dict(self.parts).get(name)
        return None if text is None else json.loads(text)

    def differences(self, other: "CacheKey") -> list[Difference]:
        """Return every leaf that differs from `other`; empty only if the keys are equal."""
        return list(iterate_differences(self.to_json(), other.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Return the parts as JSON types, in order; `from_json` restores an equal key."""
        return {name: json.loads(text) for name, text in self.parts}

    @classmethod
    def from_json(cls, parts: Mapping[str, Any]) -> "CacheKey":
        """Return the key whose `to_json` returned these parts.

        Raises:
            TypeError: a value is not JSON.
        """
        return cls.of(**parts)


def to_json_types(value: object, where: str) -> JSON:
    """Convert a value to JSON types: dataclasses by field, tuples as lists, mappings in order.

    Args:
        value: value to convert.
        where: name of the value in errors.

    Raises:
        TypeError: the value, or a value inside it, is not JSON.
    """
    if value is None or isinstance(value, str | int) or _is_finite(value):
        return value  # bool is an int
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {
            _name(key, where): to_json_types(item, f"{where}.{key}") for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_json_types(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{where}: {value!r} is not JSON; use str, int, finite float, bool, list, dict")


def iterate_differences(mine: Any, theirs: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yield the leaves in which two values of JSON types differ.

    Lists are leaves, unless they have equal lengths and contain mappings.
    """
    if repr(mine) == repr(
        theirs
    ):  # unlike ==, repr distinguishes 1 from 1.0 and compares the order
        return
    if isinstance(mine, dict) and isinstance(theirs, dict):
        yield from _compare_mappings(mine, theirs, path)
    elif _both_hold_mappings(mine, theirs):
        for index, (item, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from iterate_differences(item, other, (*path, str(index)))
    else:
        yield Difference(path, mine, theirs)


def _compare_mappings(mine: dict, theirs: dict, path: tuple[str, ...]) -> Iterator[Difference]:
    for name in mine | theirs:
        if name in mine and name in theirs:
            yield from iterate_differences(mine[name], theirs[name], (*path, name))
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
    # JSON writes the names 1 and "1" identically, so two keys would collide
    if not isinstance(key, str):
        raise TypeError(f"{where}: the name {key!r} is not a string")
    return key


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))  # not sorted: the order of mesh axes matters
