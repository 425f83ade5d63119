"""What could not be compiled: kept, so that a failure can be looked into where it happened."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphtrain.cache.layout import Layout, checked
from graphtrain.cache.writing import temporary_directory, write_file, writing

_REASON = "failure.json"


@dataclass(frozen=True)
class Failure:
    """Why a graph did not compile."""

    error: str
    kind: str  # class of the error
    directory: Path


def store_failure(
    layout: Layout, digest: str, name: str, text: str, log: str, reason: Mapping[str, str]
) -> Path:
    """Keep the program text and the compiler's log of a failure; return their directory.

    A failure of the same digest and name replaces the last. The digest is of a request, which
    holds the toolchain: another compiler is another request.

    Args:
        reason: error and kind of a failure that would be the same again; empty for others.

    Raises:
        CacheError: the disk is full, or the store cannot be written.
    """
    path = layout.failures / directory_name(name, digest)
    files = {"program.mlir": text.encode(), "log.txt": log.encode(errors="replace")}
    if reason:
        files[_REASON] = (json.dumps(dict(reason)) + "\n").encode()
    return store_files(layout, path, files)


def read_failure(layout: Layout, digest: str, name: str) -> Failure | None:
    """The failure of a request that compiling it again would only repeat."""
    directory = layout.failures / directory_name(name, digest)
    try:
        reason = json.loads((directory / _REASON).read_bytes())
        return Failure(str(reason["error"]), str(reason["kind"]), directory)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def directory_name(name: str, digest: str) -> str:
    """A name that people and programs can tell from others."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}-{checked(digest)}"


def store_files(layout: Layout, path: Path, files: Mapping[str, bytes]) -> Path:
    """Put files into a directory, all at once, in place of what is there; return the directory."""
    with writing(path, sum(map(len, files.values()))):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directory(layout) as temporary:
            for file_name, data in files.items():
                write_file(temporary / file_name, data)
            shutil.rmtree(path, ignore_errors=True)
            os.rename(temporary, path)
    return path
