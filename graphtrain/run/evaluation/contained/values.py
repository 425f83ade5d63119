"""Values that cross between the process of an answer and that of its tests, as JSON.

Only data crosses: an object that decides by itself what it is equal to stays where it is. Of a
subclass, the data of the class crosses.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from types import GeneratorType
from typing import Any

_MOST_BYTES = 1 << 24  # of a message
_MOST_OF_ITERATOR = 1 << 20  # elements
_LARGE = 1 << 63  # integers of more bits are written in hexadecimal digits
_COLLECTIONS: tuple[Any, ...] = (list, tuple, set, frozenset)
_ITERATORS = (GeneratorType, map, filter, zip, reversed, enumerate)


class CannotCross(Exception):
    """A value that is no data of the types that cross, or a message that is not well-formed."""


def encode(value: Any) -> Any:
    """Return a value as JSON has it.

    Raises:
        CannotCross: it is none of None, numbers, texts, bytes, ranges, lists, tuples, sets, dicts
            and iterators of these.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -_LARGE < number < _LARGE else ["int", hex(number)]
    if isinstance(value, float):
        return float.__add__(value, 0.0) if value else float.__mul__(value, 1.0)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", *map(encode, (value.start, value.stop, value.step))]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(one)] for key, one in dict.items(value)]]
    for kind in _COLLECTIONS:
        if isinstance(value, kind):
            return [kind.__name__, [encode(one) for one in kind.__iter__(value)]]
    if isinstance(value, _ITERATORS):
        items = [encode(one) for one in islice(value, _MOST_OF_ITERATOR)]
        if next(value, value) is not value:  # an iterator does not contain itself
            raise CannotCross(f"an iterator of more than {_MOST_OF_ITERATOR:,} values")
        return ["iterator", items]
    raise CannotCross(f"an object of type {type(value).__name__[:100]}")


def decode(value: Any) -> Any:
    """Return the value of `encode`.

    Raises:
        CannotCross: it is not as `encode` makes it.
    """
    if not isinstance(value, list):
        return value
    try:
        kind, *given = value
        return _DECODERS[kind](*given)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotCross("a message that is not well-formed") from error


def _items(kind: Any) -> Any:
    return lambda items: kind([decode(one) for one in items])


_DECODERS: dict[str, Any] = {
    "int": lambda digits: int(digits, 16),
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda *numbers: range(*map(decode, numbers)),
    "dict": lambda items: {decode(key): decode(one) for key, one in items},
    "iterator": _items(iter),
    **{kind.__name__: _items(kind) for kind in _COLLECTIONS},
}


def replace_content(old: Any, new: Any) -> None:
    """Give a list, dict, set or bytearray the content of another; inner ones stay the same too."""
    if isinstance(old, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            if _is_mutable_like(before, after):
                replace_content(before, after)
            else:
                old[index] = after
    elif isinstance(old, dict):
        kept = {key: one for key, one in old.items() if _is_mutable_like(one, new.get(key))}
        for key, one in kept.items():
            replace_content(one, new[key])
        old.clear()
        old.update(new | kept)
    elif isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, set):
        old.clear()
        old.update(new)


def _is_mutable_like(old: Any, new: Any) -> bool:
    return isinstance(old, list | dict | set | bytearray) and type(old) is type(new)


def send(descriptor: int, message: Any) -> None:
    """Write a message to a pipe."""
    data = json.dumps(message).encode()
    if len(data) > _MOST_BYTES:
        raise CannotCross(f"a value of more than {_MOST_BYTES} bytes")
    data = b"%08x" % len(data) + data
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Any:
    """Read a message from a pipe.

    Raises:
        EOFError: the other process has ended.
        CannotCross: it is not a message.
    """
    try:
        length = int(_read(descriptor, 8), 16)
        if not 0 <= length <= _MOST_BYTES:
            raise CannotCross("a message that is too long")
        return json.loads(_read(descriptor, length))
    except (ValueError, RecursionError) as error:
        raise CannotCross("a message that is not well-formed") from error


def _read(descriptor: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        if not (part := os.read(descriptor, min(length - len(data), 1 << 16))):
            raise EOFError("the other process has ended")
        data += part
    return data
