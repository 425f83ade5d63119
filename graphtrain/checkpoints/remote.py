"""Checkpoints of a run in an object store, or in a directory on another disk.

Objects are written and read through `graphtrain.cache.remote`. Nothing is trusted before its size
and its SHA-256 digest are those of the manifest.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from graphtrain.cache.remote import RETRY_SECONDS, Consume, ObjectStore, UnusableObject
from graphtrain.checkpoints.info import CheckpointInfo, read_checkpoint_info
from graphtrain.checkpoints.manifest import NAME as LOCAL_MANIFEST
from graphtrain.checkpoints.manifest import UNVERIFIED, recorded_files, verify_files
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.remote_manifest import (
    FILES,
    MAX_MANIFEST_BYTES,
    STEPS,
    DamagedRemoteCheckpoint,
    RemoteFile,
    RemoteManifest,
    decode_manifest,
    manifest_name,
    new_prefix,
    prefix_of,
    step_of,
)
from graphtrain.checkpoints.run_files import copy_run_files, install_run_files
from graphtrain.errors import TrainingError
from graphtrain.files import content_digest

T = TypeVar("T")
R = TypeVar("R")
_CONCURRENT_FILES = 4
_UNFINISHED_SECONDS = 24 * 3600  # after which the objects of an upload without a manifest are waste


class RemoteCheckpoints:
    """Checkpoints of one run in an object store."""

    def __init__(
        self,
        url: str,
        endpoint: str | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
        create: bool = False,
    ) -> None:
        """Open the store.

        Args:
            url: URL, or path of a directory.
            endpoint: Server of an S3-compatible store; None: that of the environment.
            retry_seconds: Seconds for which a failed request is repeated.
            create: Create a directory that does not exist.

        Raises:
            CacheError: the store cannot be opened.
        """
        self.url = url
        self._store = ObjectStore(url, retry_seconds, create=create, endpoint=endpoint)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first.

        Raises:
            CacheError: the store cannot be listed.
        """
        found = (step_of(name) for name in self._store.names(STEPS))
        return sorted(step for step in found if step is not None)

    def manifest(self, step: int) -> RemoteManifest:
        """Return the manifest of a checkpoint.

        Raises:
            DamagedRemoteCheckpoint: the checkpoint does not exist, or its manifest is damaged.
            CacheError: the store cannot be read.
        """
        try:
            data = self._store.get(manifest_name(step), MAX_MANIFEST_BYTES)
            if data is not None:
                return decode_manifest(data, step)
        except (UnusableObject, ValueError) as error:
            raise DamagedRemoteCheckpoint(self.url, step, str(error)) from error
        raise DamagedRemoteCheckpoint(self.url, step, "it has no manifest")

    def upload(self, run_directory: Path, step: int) -> RemoteManifest:
        """Upload a checkpoint, which is verified first, and the files that describe its run.

        Raises:
            DamagedCheckpoint: a file of the checkpoint is not as it was written.
            CacheError: an object cannot be written. Then the checkpoint does not exist there.
        """
        source = run_directory / "checkpoints" / str(step)
        verify_files(source)
        info = read_checkpoint_info(run_directory / "checkpoints", step)
        prefix = new_prefix(step)
        with tempfile.TemporaryDirectory(prefix="graphtrain-upload-") as temporary:
            run = copy_run_files(run_directory, Path(temporary), info.journal)
            names = [*recorded_files(source), *UNVERIFIED]
            checkpoint = {name: source / name for name in names if (source / name).is_file()}
            put = partial(self._put, prefix)
            manifest = RemoteManifest(
                step,
                time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                prefix,
                _in_parallel(partial(put, "checkpoint"), checkpoint),
                _in_parallel(partial(put, "run"), run),
                info.validation_loss,
            )
        self._store.put(manifest_name(step), manifest.encode())
        return manifest

    def has(self, run_directory: Path, step: int) -> bool:
        """Return whether the local checkpoint of a step is complete in the store.

        Raises:
            CacheError: the store cannot be read.
        """
        if step not in self.steps():
            return False
        try:
            file = self.manifest(step).checkpoint.get(LOCAL_MANIFEST)
        except DamagedRemoteCheckpoint:
            return False
        path = run_directory / "checkpoints" / str(step) / LOCAL_MANIFEST
        return file is not None and file.sha256 == content_digest(path)

    def download(
        self,
        step: int,
        run_directory: Path,
        progress: Callable[[], None] = lambda: None,
        move_away: Callable[[Path], None] | None = None,
    ) -> Path:
        """Download and verify a checkpoint into the directory of a run; return its path.

        It appears under its name when it is complete. Files of the run that exist are kept.

        Args:
            step: Step of the checkpoint.
            run_directory: Directory of the run.
            progress: Called after each part, in any thread.
            move_away: Called with the path of a checkpoint of this step that exists, when the other
                is there; None: it is refused.

        Raises:
            DamagedRemoteCheckpoint: an object is missing, or not as it was uploaded.
            TrainingError: the directory cannot be written, or has this checkpoint.
            CacheError: the store cannot be read.
        """
        manifest = self.manifest(step)
        checkpoints = run_directory / "checkpoints"
        destination, partial_path = checkpoints / str(step), checkpoints / f"{step}.download"
        if destination.exists() and move_away is None:
            raise TrainingError(f"{destination} exists already; move it away to download it again")
        with write_errors(run_directory):
            shutil.rmtree(partial_path, ignore_errors=True)
            try:
                files = manifest.checkpoint
                self._download_files(manifest, "checkpoint", files, partial_path, progress)
                verify_files(partial_path)
                with tempfile.TemporaryDirectory(dir=partial_path) as temporary:
                    self._download_files(manifest, "run", manifest.run, Path(temporary))
                    install_run_files(Path(temporary), run_directory)
                if destination.exists() and move_away is not None:
                    move_away(destination)
                partial_path.rename(destination)
            finally:
                shutil.rmtree(partial_path, ignore_errors=True)
        return destination

    def download_description(self, step: int, directory: Path) -> RemoteManifest:
        """Download what describes a checkpoint, without its arrays, into a new directory.

        Raises:
            DamagedRemoteCheckpoint, CacheError: as for `download`.
        """
        manifest = self.manifest(step)
        names = ("about/metadata", "state/_sharding", LOCAL_MANIFEST)
        chosen = {name: manifest.checkpoint[name] for name in names if name in manifest.checkpoint}
        self._download_files(manifest, "checkpoint", chosen, directory)
        return manifest

    def info(self, step: int) -> CheckpointInfo:
        """Return the metadata of a checkpoint.

        Raises:
            TrainingError: they are damaged: DamagedRemoteCheckpoint, or cannot be read.
            CacheError: the store cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="graphtrain-download-") as temporary:
            self.download_description(step, Path(temporary) / str(step))
            return read_checkpoint_info(Path(temporary), step)

    def is_empty(self) -> bool:
        """Return whether the store has nothing of a run, not even of an interrupted upload.

        Raises:
            CacheError: the store cannot be listed.
        """
        return not any(next(self._store.names(prefix), None) for prefix in (STEPS, FILES))

    def verify(self, step: int) -> None:
        """Read every object of a checkpoint.

        Raises:
            DamagedRemoteCheckpoint: an object is missing, or not as it was uploaded.
            CacheError: the store cannot be read.
        """
        objects = self.manifest(step).objects()
        _in_parallel(
            lambda name, file: self._read(step, name, file, lambda: lambda part: None), objects
        )

    def delete(self, step: int) -> None:
        """Delete a checkpoint, its manifest first.

        Raises:
            CacheError: an object cannot be deleted.
        """
        names: Collection[str] = ()
        with suppress(DamagedRemoteCheckpoint):
            names = self.manifest(step).objects()
        self._store.delete(manifest_name(step))
        _in_parallel(lambda name, _: self._store.delete(name), dict.fromkeys(names))

    def unfinished(self) -> dict[str, list[str]]:
        """Return the objects of uploads that ended a day ago without a manifest, by their prefix.

        Raises:
            CacheError: the store cannot be read.
        """
        limit = time.time() - _UNFINISHED_SECONDS
        found: dict[str, list[str]] = {}
        for name in self._store.names(FILES):
            upload = prefix_of(name)
            if upload is not None and upload[1] < limit:
                found.setdefault(upload[0], []).append(name)
        if found:
            for step in self.steps():
                with suppress(DamagedRemoteCheckpoint):
                    found.pop(self.manifest(step).prefix, None)
        return found

    def delete_objects(self, names: Collection[str]) -> None:
        """Delete objects that `unfinished` returned.

        Raises:
            CacheError: an object cannot be deleted.
        """
        _in_parallel(lambda name, _: self._store.delete(name), dict.fromkeys(names))

    def _put(self, prefix: str, kind: str, name: str, path: Path) -> RemoteFile:
        file = RemoteFile(path.stat().st_size, content_digest(path))
        self._store.put_file(f"{prefix}/{kind}/{name}", path)
        return file

    def _download_files(
        self,
        manifest: RemoteManifest,
        kind: str,
        files: dict[str, RemoteFile],
        directory: Path,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        def fetch(name: str, file: RemoteFile) -> None:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as target:

                def use(part: bytes) -> None:
                    target.write(part)
                    progress()

                def begin() -> Consume:
                    target.seek(0)
                    target.truncate()
                    return use

                self._read(manifest.step, f"{manifest.prefix}/{kind}/{name}", file, begin)

        directory.mkdir(parents=True, exist_ok=True)
        _in_parallel(fetch, files)

    def _read(self, step: int, name: str, file: RemoteFile, begin: Callable[[], Consume]) -> None:
        """Read an object and verify it; `begin` as of `ObjectStore.stream`.

        Raises:
            DamagedRemoteCheckpoint: it is missing, or not as it was uploaded.
        """
        digest = hashlib.sha256()

        def begin_digest() -> Consume:
            nonlocal digest
            digest, use = hashlib.sha256(), begin()

            def consume(part: bytes) -> None:
                digest.update(part)
                use(part)

            return consume

        try:
            self._store.stream(name, file.size, begin_digest)
        except UnusableObject as error:
            raise DamagedRemoteCheckpoint(self.url, step, str(error)) from error
        if digest.hexdigest() != file.sha256:
            raise DamagedRemoteCheckpoint(
                self.url, step, f"{name} does not have the digest it was uploaded with"
            )


def _in_parallel(action: Callable[[str, T], R], items: Mapping[str, T]) -> dict[str, R]:
    """Return the result of an action for each item; the first error cancels those not started."""
    with ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        futures = {name: pool.submit(action, name, item) for name, item in items.items()}
        try:
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
