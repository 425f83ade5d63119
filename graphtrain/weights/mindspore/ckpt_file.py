"""Reader and writer of MindSpore's `.ckpt` files, one tensor at a time.

A file is one protocol buffer: a list of values, each with a tag, dimensions, a type and bytes. The
values of a large tensor follow one another, each with the next bytes. Files may end with a CRC.
"""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.weights.files import DTYPES

_DTYPES = {"Float32": DTYPES["F32"], "Float16": DTYPES["F16"], "BFloat16": DTYPES["BF16"]}
_TYPES = {dtype: name for name, dtype in _DTYPES.items()}
_SLICE_BYTES = 512 << 20  # of one value, as MindSpore writes them
_BLOCK_BYTES = 16 << 20  # read at once for the CRC
_CRC, _CRC_BYTES = b"crc_num", 10
_MOST_NAME_BYTES = 4096
_MOST_ELEMENTS, _MOST_DIMENSIONS = 1 << 48, 32
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_STATE = re.compile(  # of optimizers and of training: not weights
    r"(adam_m|adam_v|moment[12]|accu_grads)\..*|.*(global_step|epoch_num|step_num|loss_scale|"
    r"learning_rate|beta[12]_power|overflow_iterator_step|current_iterator_step|scale_sense).*"
)


@dataclass
class _Tensor:
    dtype: str  # MindSpore's name
    shape: tuple[int, ...]
    slices: list[tuple[int, int]] = field(default_factory=list)  # offset and bytes in the file


class CkptFile:
    """Tensors of a `.ckpt` file that are weights.

    Raises:
        WeightsError: the file is damaged, encrypted, or has tables of embeddings (MapParameter).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():  # also a pipe, which would be waited for
            raise WeightsError(f"{path} is no file")
        try:
            size = _content_bytes(path)
            with path.open("rb") as file:
                self._tensors = _index(_Fields(file, path, 0, size), path)
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def dtype(self, name: str) -> np.dtype:
        kind = self._tensors[name].dtype
        if kind not in _DTYPES:
            raise WeightsError(
                f"{self._path}: {name} has type {kind!r}, which is not supported; supported: "
                f"{', '.join(_DTYPES)}"
            )
        return _DTYPES[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        tensor, dtype = self._tensors[name], self.dtype(name)
        size = sum(length for _, length in tensor.slices)
        if size != math.prod(tensor.shape) * dtype.itemsize:
            raise WeightsError(
                f"{self._path}: {name} has {size} bytes, which are no {tensor.dtype} of shape "
                f"{tensor.shape}; the file is damaged"
            )
        content, at = bytearray(size), 0
        with self._path.open("rb") as file:
            for offset, length in tensor.slices:
                file.seek(offset)
                file.readinto(memoryview(content)[at : at + length])
                at += length
        return np.frombuffer(content, dtype).reshape(tensor.shape)


def _content_bytes(path: Path) -> int:
    """Return the bytes before the CRC, after verifying it if there is one."""
    size, trailer = path.stat().st_size, len(_CRC) + _CRC_BYTES
    with path.open("rb") as file:
        file.seek(max(0, size - trailer))
        end = file.read(trailer)
        if not end.startswith(_CRC) or size < trailer:
            return size
        file.seek(0)
        crc, left = 0, size - trailer
        while left:
            block = file.read(min(_BLOCK_BYTES, left))
            if not block:
                break
            crc, left = binascii.crc32(block, crc), left - len(block)
    if crc != int.from_bytes(end[len(_CRC) :], "big"):
        raise WeightsError(f"{path} is damaged: its CRC is not that of its content")
    return size - trailer


class _Fields:
    """Fields of the message in a range of a file, which checks that each ends inside the range."""

    def __init__(self, file: BinaryIO, path: Path, begin: int, end: int) -> None:
        self._file, self._path, self._at, self._end = file, path, begin, end

    def __iter__(self) -> Iterator[tuple[int, int | _Fields]]:
        """Yield the number of each field, with its integer or the range of its content."""
        while self._at < self._end:
            key = self._integer()
            number, wire = key >> 3, key & 7
            if wire == _VARINT:
                yield number, self._integer()
                continue
            length = {_FIXED_64: 8, _FIXED_32: 4}.get(wire)
            if wire == _LENGTH:
                length = self._integer()
            if length is None or number == 0 or length > self._end - self._at:
                raise self._damaged()
            begin, self._at = self._at, self._at + length
            yield number, _Fields(self._file, self._path, begin, self._at)

    @property
    def location(self) -> tuple[int, int]:
        """Offset and number of bytes in the file."""
        return self._at, self._end - self._at

    def text(self) -> str:
        """Return the content as text."""
        if self._end - self._at > _MOST_NAME_BYTES:
            raise self._damaged()
        self._file.seek(self._at)
        try:
            return self._file.read(self._end - self._at).decode()
        except UnicodeDecodeError as error:
            raise self._damaged() from error

    def integers(self) -> list[int]:
        """Return the content as packed integers."""
        found = []
        while self._at < self._end:
            found.append(self._integer())
        return found

    def _integer(self) -> int:
        self._file.seek(self._at)
        content = self._file.read(min(10, self._end - self._at))
        result = 0
        for index, byte in enumerate(content):
            result |= (byte & 127) << (7 * index)
            if byte < 128:
                self._at += index + 1
                return result
        raise self._damaged()

    def _damaged(self) -> WeightsError:
        return WeightsError(
            f"{self._path} is no complete .ckpt file of MindSpore: byte {self._at} is damaged, the "
            "file was cut, or it is encrypted"
        )


def _index(fields: _Fields, path: Path) -> dict[str, _Tensor]:
    """Return the tensors of all values that are weights."""
    tensors: dict[str, _Tensor] = {}
    last = None
    for number, value in fields:
        if number != 1 or not isinstance(value, _Fields):
            raise WeightsError(f"{path} is no .ckpt file of MindSpore: it has a field {number}")
        tag, tensor = _value(value, path)
        if tag in tensors and tag != last:
            raise WeightsError(f"{path} has {tag} twice, with other tensors between; it is damaged")
        last = tag
        if tensor is None or _STATE.fullmatch(tag):
            continue
        known = tensors.setdefault(tag, _Tensor(tensor.dtype, tensor.shape))
        if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
            raise WeightsError(f"{path}: parts of {tag} have different types or shapes")
        known.slices += tensor.slices
    if not tensors:
        raise WeightsError(f"{path} has no weights; is it a strategy file?")
    return tensors


def _value(fields: _Fields, path: Path) -> tuple[str, _Tensor | None]:
    """Return the tag of a value and its tensor; None if it is text."""
    tag, tensor = "", None
    for number, content in fields:
        if not isinstance(content, _Fields) or number not in (1, 2, 3):
            raise WeightsError(f"{path} is no .ckpt file of MindSpore: unknown field of a value")
        if number == 1:
            tag = content.text()
        elif number == 2:
            tensor = _tensor(content, path)
        else:
            raise WeightsError(f"{path}: {tag} is a MapParameter, which is not supported")
    if not tag or tensor is None:
        raise WeightsError(f"{path} is damaged: a value has no tag or no tensor")
    return tag, None if tensor.dtype == "str" else tensor


def _tensor(fields: _Fields, path: Path) -> _Tensor:
    dtype, dimensions, slices = "", [], []
    for number, content in fields:
        if number == 1:
            dimensions += content.integers() if isinstance(content, _Fields) else [content]
        elif number == 2 and isinstance(content, _Fields):
            dtype = content.text()
        elif number == 3 and isinstance(content, _Fields):
            slices.append(content.location)
        else:
            raise WeightsError(f"{path} is no .ckpt file of MindSpore: unknown field of a tensor")
    if not dtype or len(slices) != 1 or _is_too_large(dimensions):
        raise WeightsError(f"{path} is damaged: a tensor has no type or content, or a wrong shape")
    return _Tensor(dtype, () if dimensions == [0] else tuple(dimensions), slices)


def _is_too_large(dimensions: list[int]) -> bool:
    if len(dimensions) > _MOST_DIMENSIONS:
        return True
    return math.prod(max(1, size) for size in dimensions) > _MOST_ELEMENTS


class CkptWriter:
    """Writer of one `.ckpt` file, with a CRC.

    Args:
        path: File to create.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._crc = path, 0
        path.touch(exist_ok=False)

    def write(self, name: str, array: np.ndarray) -> None:
        """Append a tensor; several values if it is large."""
        content = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        head = b"".join(_field(1, 0) + _varint(size) for size in array.shape or (0,))
        head += _bytes(2, _TYPES[array.dtype].encode())
        for begin in range(0, max(1, len(content)), _SLICE_BYTES):
            part = content[begin : begin + _SLICE_BYTES]
            start = head + _field(3, 2) + _varint(len(part))
            tag = _bytes(1, name.encode())
            inner = _field(2, 2) + _varint(len(start) + len(part)) + start
            length = len(tag) + len(inner) + len(part)
            self._append(_field(1, 2) + _varint(length) + tag + inner, part)

    def close(self) -> None:
        """Append the CRC."""
        with self._path.open("ab") as file:
            file.write(_CRC + self._crc.to_bytes(_CRC_BYTES, "big"))

    def _append(self, *parts: bytes | memoryview) -> None:
        with self._path.open("ab") as file:
            for part in parts:
                file.write(part)
                self._crc = binascii.crc32(part, self._crc)


def _field(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _bytes(number: int, content: bytes) -> bytes:
    return _field(number, _LENGTH) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
