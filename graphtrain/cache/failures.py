"""What could not be compiled: kept, so that a failure can be looked into where it happened."""

import os
import re
import shutil
from pathlib import Path

from graphtrain.cache.layout import Layout, checked
from graphtrain.cache.writing import temporary_directory, write_file, writing


def store_failure(layout: Layout, digest: str, name: str, text: str, log: str) -> Path:
    """Keep the program text and the compiler's log of a failure; return their directory.

    A failure of the same digest and name replaces the last.

    Raises:
        CacheError: the disk is full, or the store cannot be written.
    """
    readable_name = re.sub(r"[^A-Za-z0-9_-]+", "-", name)
    path = layout.failures / f"{readable_name}-{checked(digest)}"
    files = {"program.mlir": text.encode(), "log.txt": log.encode(errors="replace")}
    with writing(path, sum(map(len, files.values()))):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directory(layout) as temporary:
            for file_name, data in files.items():
                write_file(temporary / file_name, data)
            shutil.rmtree(path, ignore_errors=True)
            os.rename(temporary, path)
    return path
