"""Safetensors writer for one array at a time, in any order, with little memory.

The safetensors library needs all arrays of a file in memory. The header of the format, however,
contains the position of each array, so this writer creates files of the final size first and writes
each array when it is ready.

Source: https://huggingface.co/docs/safetensors, "Format"
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from graphtrain.weights.files import FILE_CODES

MAX_FILE_BYTES = 5_000_000_000  # bytes per file; the default limit of transformers
_COPY_BLOCK_BYTES = 16 << 20  # bytes copied at once

Specs = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


class SafetensorsWriter:
    """Writer of the safetensors files of one folder, with an index if there are several."""

    def __init__(
        self, directory: Path, arrays: Specs, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """Create the files for these arrays.

        Args:
            directory: folder to write to.
            arrays: dtype and shape by name, of all arrays.
            max_file_bytes: maximum size of a file in bytes; a larger array gets a file of its own.
        """
        self._directory = directory
        self._left = dict(arrays)
        self._where: dict[str, tuple[str, int]] = {}
        self._bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        shards = _divide(arrays, max_file_bytes)
        for shard_number, shard in enumerate(shards, 1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{shard_number:05}-of-{len(shards):05}.safetensors"
            self._create_file(name, shard)

    def write(self, name: str, array: np.ndarray) -> None:
        """Write an array to its position; its memory layout does not matter."""
        dtype, shape = self._left.pop(name)
        assert (array.dtype, array.shape) == (dtype, shape), (name, array.dtype, array.shape)
        file_name, offset = self._where[name]
        rows = array.reshape(1) if array.ndim == 0 else array
        step = max(1, _COPY_BLOCK_BYTES // max(1, array.nbytes // len(rows)))
        with (self._directory / file_name).open("r+b") as file:
            file.seek(offset)
            for begin in range(0, len(rows), step):
                file.write(np.ascontiguousarray(rows[begin : begin + step]).tobytes())

    def close(self) -> None:
        """Write the index; every array must have been written."""
        assert not self._left, f"not written: {', '.join(self._left)}"
        files = {name: file for name, (file, _) in self._where.items()}
        if len(set(files.values())) > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": files}
            path = self._directory / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n")

    def _create_file(self, file_name: str, arrays: Specs) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # required by transformers
        end = 0
        for name, (dtype, shape) in arrays.items():
            begin, end = end, end + _size(dtype, shape)
            header[name] = {
                "dtype": FILE_CODES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the arrays to 8 bytes
        with (self._directory / file_name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        offset = 8 + len(text)
        for name, (dtype, shape) in arrays.items():
            self._where[name] = file_name, offset
            offset += _size(dtype, shape)
        self._bytes += end


def _divide(
    arrays: Specs, max_file_bytes: int
) -> list[dict[str, tuple[np.dtype, tuple[int, ...]]]]:
    """Divide the arrays, in order, into files of at most `max_file_bytes` or of one array."""
    shards: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = [{}]
    file_bytes = 0
    for name, (dtype, shape) in arrays.items():
        size = _size(dtype, shape)
        if shards[-1] and file_bytes + size > max_file_bytes:
            shards.append({})
            file_bytes = 0
        shards[-1][name] = dtype, shape
        file_bytes += size
    return shards


def _size(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)
