"""Digests of blocks of large files, so that a sample of a file can be verified in milliseconds."""

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 18  # bytes of a block
_BLOCKS = 256  # at most, in a file; those of a larger file are spread evenly over it
_SAMPLE = 16  # blocks that are verified at a time


def sample_digests(prefix: str | Path, paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return short digests of evenly spread blocks of each file, by its name after the prefix."""
    digests = {}
    for path in paths:
        starts = _starts(path.stat().st_size)
        with path.open("rb") as file:
            digests[str(path).removeprefix(str(prefix))] = [
                _digest(file, start) for start in starts
            ]
    return digests


def damaged_block(
    prefix: str | Path, digests: Mapping[str, Sequence[str]]
) -> tuple[Path, int] | None:
    """Verify some blocks of each file, others each time; return the first that differs, if any.

    Returns:
        The file, and the offset of the block in bytes.
    """
    for suffix, recorded in digests.items():
        path = Path(f"{prefix}{suffix}")
        starts = list(_starts(path.stat().st_size))
        if len(starts) != len(recorded):
            return path, 0
        with path.open("rb") as file:
            for index in random.sample(range(len(starts)), min(_SAMPLE, len(starts))):
                if _digest(file, starts[index]) != recorded[index]:
                    return path, starts[index]
    return None


def _starts(size: int) -> Iterable[int]:
    count = min(_BLOCKS, -(-size // _BLOCK))
    return (index * size // count for index in range(count))


def _digest(file: BinaryIO, start: int) -> str:
    file.seek(start)
    return hashlib.sha256(file.read(_BLOCK)).hexdigest()[:16]
