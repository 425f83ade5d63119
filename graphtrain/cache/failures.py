"""Failed compilations: program text and compiler log, stored for inspection."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphtrain.cache.layout import StorePaths, validate_digest
from graphtrain.cache.programs import UnusableEntry, read_bytes
from graphtrain.cache.writing import temporary_directory, write_errors, write_file
from graphtrain.errors import CacheError

_REASON = "failure.json"
_MAX_REASON_BYTES = 1024 * 1024


@dataclass(frozen=True)
class StoredFailure:
    """Stored failure of one graph's compilation."""

    error: str
    error_type: str  # class name of the error
    directory: Path


def store_failure(
    layout: StorePaths, digest: str, name: str, text: str, log: str, reason: Mapping[str, str]
) -> Path:
    """Store the program text and compiler log of a failed compilation; return their directory.

    A failure with the same digest and name is replaced. The request digest covers the toolchain,
    so a failure of another compiler version is stored separately.

    Args:
        layout: paths of the cache.
        digest: request digest.
        name: graph name.
        text: program text (StableHLO).
        log: compiler log.
        reason: "error" and "kind" of a deterministic failure; empty for a transient one.

    Raises:
        CacheError: the disk is full, or the cache is not writable.
    """
    path = layout.failures / directory_name(name, digest)
    files = {"program.mlir": text.encode(), "log.txt": log.encode(errors="replace")}
    if reason:
        files[_REASON] = (json.dumps(dict(reason)) + "\n").encode()
    return store_files(layout, path, files)


def read_failure(layout: StorePaths, digest: str, name: str) -> StoredFailure | None:
    """Return the stored deterministic failure of a request, or None."""
    directory = layout.failures / directory_name(name, digest)
    try:
        reason = json.loads(read_bytes(directory / _REASON, _MAX_REASON_BYTES))
        return StoredFailure(str(reason["error"]), str(reason["kind"]), directory)
    except (UnusableEntry, CacheError, ValueError, KeyError, TypeError, RecursionError):
        return None


def directory_name(name: str, digest: str) -> str:
    """Return a readable and unique directory name: the graph name and the digest."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}-{validate_digest(digest)}"


def store_files(layout: StorePaths, path: Path, files: Mapping[str, bytes]) -> Path:
    """Replace a directory with one that contains these files; return its path."""
    with write_errors(path, sum(map(len, files.values()))):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directory(layout) as temporary:
            for file_name, data in files.items():
                write_file(temporary / file_name, data)
            shutil.rmtree(path, ignore_errors=True)
            os.rename(temporary, path)
    return path
