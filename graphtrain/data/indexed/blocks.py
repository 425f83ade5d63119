"""Digests of blocks of large files: of a sample, to verify it in milliseconds; of all, to stream.

A streamed dataset is read block by block, and each is verified before a token of it is used.
"""

import base64
import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 18  # bytes of a block
_BLOCKS = 256  # at most, in a file; those of a larger file are spread evenly over it
_SAMPLE = 16  # blocks that are verified at a time
_DIGEST_BYTES = 16  # of a block of `BlockDigests`
_MAX_BLOCKS = 1 << 18  # of `BlockDigests`, so that a description is read fast; 64 GiB of 256 KiB


@dataclass(frozen=True, kw_only=True)
class BlockDigests:
    """Digests of all blocks of a .bin, in order; the last block may be shorter."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    block_bytes: int  # a multiple of the size of a token
    digests: str  # of 16 bytes each, BLAKE2b, in base64

    @classmethod
    def of(cls, path: Path) -> "BlockDigests":
        """Read a file, and return the digests of its blocks."""
        size, nbytes = path.stat().st_size, _BLOCK
        while size > _MAX_BLOCKS * nbytes:
            nbytes *= 2
        digests = bytearray()
        with path.open("rb") as file:
            while block := file.read(nbytes):
                digests += block_digest(block)
        return cls(block_bytes=nbytes, digests=base64.b64encode(digests).decode())

    def decode(self) -> list[bytes]:
        """Return the digest of each block.

        Raises:
            ValueError: they are damaged.
        """
        digests = base64.b64decode(self.digests, validate=True)
        if len(digests) % _DIGEST_BYTES or self.block_bytes < 8 or self.block_bytes % 8:
            raise ValueError("the digests of its blocks are damaged")
        starts = range(0, len(digests), _DIGEST_BYTES)
        return [digests[start : start + _DIGEST_BYTES] for start in starts]


def block_digest(block: bytes) -> bytes:
    """Return the digest of a block as `BlockDigests` has it."""
    return hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest()


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
