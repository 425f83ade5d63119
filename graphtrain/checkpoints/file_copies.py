"""Copies of the files of a run in an object store: metrics, logs, TensorBoard events, profiles.

    run/metrics.jsonl, run/tensorboard/..., ...   of the first directory that used the store
    run-2/...                                     of the second one

Each directory of a run has a folder of its own in the store, whose name is in `RECORD`. So a new
machine, or `--fresh`, never replaces what another one wrote. Nothing is ever deleted there.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphtrain.cache.remote import RETRY_SECONDS, ObjectStore
from graphtrain.checkpoints.run_files import METRICS
from graphtrain.config.run_record import CONFIG
from graphtrain.config.run_record import RECORD as CONFIG_RECORD
from graphtrain.files import atomic_write
from sharding_rules.documents import DocumentError, read_object

RECORD = "upload.json"  # in the directory of a run
DUMPS = "dumps"  # in the directory of a run
_FOLDER = "run"
_MAX_RECORD_BYTES = 16 << 20
_FOLDER_NAME = re.compile(rf"{_FOLDER}(-[1-9][0-9]{{0,5}})?", re.ASCII)
_FILES = (
    METRICS,
    "run.log",
    "goodput.jsonl",
    "spikes.jsonl",
    "samples.jsonl",
    CONFIG,
    CONFIG_RECORD,
)
_DIRECTORIES = ("tensorboard", "stacks", "profiles", DUMPS)
_GROWING = (".jsonl", ".log")  # to which the run appends lines meanwhile


class FileCopies:
    """Copies of the files of one run in an object store."""

    def __init__(
        self,
        run_directory: Path,
        url: str,
        endpoint: str | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Prepare to upload; the store is opened by the first upload.

        Args:
            run_directory: Directory of the run.
            url: URL, or path of a directory.
            endpoint: Server of an S3-compatible store; None: that of the environment.
            retry_seconds: Seconds for which a failed request is repeated.
        """
        self.url = url
        self._directory, self._endpoint = run_directory, endpoint
        self._retry_seconds = retry_seconds
        self._opened: tuple[ObjectStore, str] | None = None
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and time of change, by name

    def upload_changed(self, *, only: str = "") -> int:
        """Upload the files that have changed since the last call; return their size in bytes.

        A file that cannot be read does not keep back the others.

        Args:
            only: Beginning of the names of the files.

        Raises:
            CacheError: the store cannot be read or written.
            OSError: a file cannot be read.
        """
        store, folder = self._open()
        nbytes, failure = 0, None
        for name, path in files_of_run(self._directory):
            if not name.startswith(only):
                continue
            try:
                found = path.stat()
                state = found.st_size, found.st_mtime_ns  # before it is read: it may grow meanwhile
                if self._uploaded.get(name) == state:
                    continue
                with _unchanging(path) as source:
                    store.put_file(f"{folder}/{name}", source)
            except FileNotFoundError:  # moved away meanwhile
                continue
            except OSError as error:
                failure = error
                continue
            self._uploaded[name] = state
            nbytes += state[0]
        if failure is not None:
            raise failure
        return nbytes

    def upload_folder(self, name: str, *, record: str, last: str) -> bool:
        """Upload a folder that is complete; return False if the store has it already.

        Args:
            name: Name of the folder in the directory of the run.
            record: File in it that says of what it is.
            last: File without which nothing can read the folder: it is uploaded last, and removed
                before another folder of this name is replaced.

        Raises:
            CacheError: the store cannot be read or written.
            OSError: a file cannot be read.
        """
        store, parent = self._open()
        source, destination = self._directory / name, f"{parent}/{name}"
        local = (source / record).read_bytes()
        is_complete = store.get(f"{destination}/{last}", _MAX_RECORD_BYTES) is not None
        if is_complete and store.get(f"{destination}/{record}", _MAX_RECORD_BYTES) == local:
            return False
        store.delete(f"{destination}/{last}")
        files = sorted(path for path in source.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path == source / last):
            store.put_file(f"{destination}/{path.relative_to(source).as_posix()}", path)
        return True

    def _open(self) -> tuple[ObjectStore, str]:
        if self._opened is None:
            store = ObjectStore(self.url, self._retry_seconds, create=True, endpoint=self._endpoint)
            self._opened = store, self._choose_folder(store)
        return self._opened

    def _choose_folder(self, store: ObjectStore) -> str:
        """Return the folder of this directory in the store, which is recorded when it is chosen."""
        path = self._directory / RECORD
        try:
            record = read_object(path)
            folder = record["folder"]
            if record["remote"] == self.url and _FOLDER_NAME.fullmatch(folder):
                return folder
        except (OSError, DocumentError, KeyError, TypeError):
            pass  # there is none, or it is damaged: then a new folder replaces nothing
        number, folder = 1, _FOLDER
        while next(store.names(f"{folder}/"), None) is not None:
            number += 1
            folder = f"{_FOLDER}-{number}"
        with atomic_write(path) as file:
            file.write(json.dumps({"remote": self.url, "folder": folder}).encode())
        return folder


def files_of_run(run_directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that are uploaded, by their names relative to the directory of the run."""
    for name in _FILES:
        if (run_directory / name).is_file():
            yield name, run_directory / name
    for folder in _DIRECTORIES:
        for path in sorted((run_directory / folder).rglob("*")):
            relative = path.relative_to(run_directory)
            is_unfinished = any(part.startswith(".") for part in relative.parts)
            if path.is_file() and not path.is_symlink() and not is_unfinished:
                yield relative.as_posix(), path


@contextmanager
def _unchanging(path: Path) -> Iterator[Path]:
    """Yield a file as it is now, with whole lines: a copy, if the run appends to it."""
    if path.suffix not in _GROWING:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="graphtrain-upload-") as temporary:
        copy = Path(temporary) / path.name
        shutil.copyfile(path, copy)
        with copy.open("rb+") as file:
            file.truncate(_end_of_lines(file.seek(0, 2), file))
        yield copy


def _end_of_lines(size: int, file) -> int:
    """Return the position after the last line break; the size, if the last line is very long."""
    start = max(0, size - (1 << 20))
    file.seek(start)
    found = file.read().rfind(b"\n")
    return start + found + 1 if found >= 0 or not start else size
