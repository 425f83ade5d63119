"""Checkpoints of a run in an object store, or in a directory on another disk.

Objects are written and read through `graphtrain.cache.remote`. Nothing is trusted before its size
and its SHA-256 digest are those of the manifest.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from graphtrain.cache.remote import RETRY_SECONDS, Consume, ObjectStore
from graphtrain.cache.store_errors import UnusableObject
from graphtrain.checkpoints.host_tier import METADATA, PART
from graphtrain.checkpoints.info import CheckpointInfo, read_checkpoint_info
from graphtrain.checkpoints.manifest import NAME as LOCAL_MANIFEST
from graphtrain.checkpoints.manifest import UNVERIFIED, recorded_files, verify_files
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.pieces import is_piece_below
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
from graphtrain.checkpoints.remote_transfers import (
    download_files,
    in_parallel,
    put_file,
    read_verified,
)
from graphtrain.checkpoints.run_files import copy_run_files, install_run_files
from graphtrain.checkpoints.whole_from_pieces import join_pieces
from graphtrain.errors import TrainingError
from graphtrain.files import content_digest

_CHECKPOINT, _RUN = "checkpoint", "run"  # folders of an upload
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
        self.store = ObjectStore(url, retry_seconds, create=create, endpoint=endpoint)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first.

        Raises:
            CacheError: the store cannot be listed.
        """
        found = (step_of(name) for name in self.store.names(STEPS))
        return sorted(step for step in found if step is not None)

    def manifest(self, step: int) -> RemoteManifest:
        """Return the manifest of a checkpoint.

        Raises:
            DamagedRemoteCheckpoint: the checkpoint does not exist, or its manifest is damaged.
            CacheError: the store cannot be read.
        """
        try:
            data = self.store.get(manifest_name(step), MAX_MANIFEST_BYTES)
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
        directory = run_directory / "checkpoints"
        source, prefix = directory / str(step), new_prefix(step)
        verify_files(source)
        names = [*recorded_files(source), *UNVERIFIED]
        files = {name: source / name for name in names if (source / name).is_file()}
        info = read_checkpoint_info(directory, step)
        return self.complete(step, prefix, self.put_files(prefix, files), run_directory, info)

    def put_files(
        self, prefix: str, files: Mapping[str, Path], kind: str = _CHECKPOINT
    ) -> dict[str, RemoteFile]:
        """Upload files; return their sizes and digests.

        Args:
            prefix: Prefix of the upload.
            files: Files by their names in the checkpoint, or in the run.
            kind: Of which of both they are.

        Raises:
            CacheError: an object cannot be written.
        """
        return in_parallel(partial(put_file, self.store, f"{prefix}/{kind}"), files)

    def complete(
        self,
        step: int,
        prefix: str,
        checkpoint: dict[str, RemoteFile],
        run_directory: Path,
        info: CheckpointInfo,
    ) -> RemoteManifest:
        """Upload the files that describe the run, then the manifest.

        Args:
            step: Step of the checkpoint.
            prefix: Prefix of the upload.
            checkpoint: Its files, which were uploaded.
            run_directory: Directory of the run.
            info: Metadata of the checkpoint.

        Raises:
            CacheError: an object cannot be written. Then the checkpoint does not exist there.
        """
        with tempfile.TemporaryDirectory(prefix="graphtrain-upload-") as temporary:
            files = copy_run_files(run_directory, Path(temporary), info.journal)
            run = self.put_files(prefix, files, _RUN)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        manifest = RemoteManifest(step, now, prefix, checkpoint, run, info.validation_loss)
        self.store.put(manifest_name(step), manifest.encode())
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
        *,
        root: str | None = None,
    ) -> Path:
        """Download and verify a checkpoint into the directory of a run; return its path.

        It appears under its name when it is complete. Files of the run that exist are kept.

        Args:
            step: Step of the checkpoint.
            run_directory: Directory of the run.
            progress: Called after each part, in any thread.
            move_away: Called with the path of a checkpoint of this step that exists, when the other
                is there; None: it is refused.
            root: Path in the state below which the arrays are that are needed, where hosts
                uploaded their parts; None for all arrays.

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
                files = _needed(manifest, root)
                self._download(manifest, _CHECKPOINT, files, partial_path, progress)
                whole = _whole(partial_path, root)
                self.download_run_files(manifest, run_directory)
                if destination.exists() and move_away is not None:
                    move_away(destination)
                whole.rename(destination)
            finally:
                shutil.rmtree(partial_path, ignore_errors=True)
        return destination

    def download_run_files(self, manifest: RemoteManifest, run_directory: Path) -> None:
        """Download the files that describe the run, where its directory lacks them.

        Raises:
            DamagedRemoteCheckpoint: an object is missing, or not as it was uploaded.
            OSError: the directory cannot be written.
            CacheError: the store cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="graphtrain-download-") as temporary:
            self._download(manifest, _RUN, manifest.run, Path(temporary))
            install_run_files(Path(temporary), run_directory)

    def read_file(self, manifest: RemoteManifest, name: str) -> bytes:
        """Return a file of a checkpoint.

        Raises:
            DamagedRemoteCheckpoint: it is missing, or not as it was uploaded.
            CacheError: the store cannot be read.
        """
        parts: list[bytes] = []

        def begin() -> Consume:
            parts.clear()
            return parts.append

        try:
            file = manifest.checkpoint[name]
        except KeyError:
            reason = f"its manifest does not name {name}"
            raise DamagedRemoteCheckpoint(self.url, manifest.step, reason) from None
        where = f"{manifest.prefix}/{_CHECKPOINT}/{name}"
        read_verified(self.store, manifest.step, where, file, begin)
        return b"".join(parts)

    def download_description(self, step: int, directory: Path) -> RemoteManifest:
        """Download what describes a checkpoint, without its arrays, into a new directory.

        Raises:
            DamagedRemoteCheckpoint, CacheError: as for `download`.
        """
        manifest = self.manifest(step)
        names = (METADATA, PART, "state/_sharding", LOCAL_MANIFEST)
        chosen = {name: manifest.checkpoint[name] for name in names if name in manifest.checkpoint}
        self._download(manifest, _CHECKPOINT, chosen, directory)
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
        return not any(next(self.store.names(prefix), None) for prefix in (STEPS, FILES))

    def verify(self, step: int) -> None:
        """Read every object of a checkpoint.

        Raises:
            DamagedRemoteCheckpoint: an object is missing, or not as it was uploaded.
            CacheError: the store cannot be read.
        """
        objects = self.manifest(step).objects()
        in_parallel(
            lambda name, file: read_verified(
                self.store, step, name, file, lambda: lambda part: None
            ),
            objects,
        )

    def delete(self, step: int) -> None:
        """Delete a checkpoint, its manifest first.

        Raises:
            CacheError: an object cannot be deleted.
        """
        names: Collection[str] = ()
        with suppress(DamagedRemoteCheckpoint):
            names = self.manifest(step).objects()
        self.store.delete(manifest_name(step))
        in_parallel(lambda name, _: self.store.delete(name), dict.fromkeys(names))

    def unfinished(self) -> dict[str, list[str]]:
        """Return the objects of uploads that ended a day ago without a manifest, by their prefix.

        Raises:
            CacheError: the store cannot be read.
        """
        limit = time.time() - _UNFINISHED_SECONDS
        found: dict[str, list[str]] = {}
        for name in self.store.names(FILES):
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
        in_parallel(lambda name, _: self.store.delete(name), dict.fromkeys(names))

    def _download(
        self,
        manifest: RemoteManifest,
        kind: str,
        files: Mapping[str, RemoteFile],
        directory: Path,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        where = f"{manifest.prefix}/{kind}"
        download_files(self.store, manifest.step, where, files, directory, progress)


def _needed(manifest: RemoteManifest, root: str | None) -> dict[str, RemoteFile]:
    """Return the files of a checkpoint without the pieces of arrays that are not below a root."""
    files = manifest.checkpoint
    if root is None or PART not in files:
        return files
    about = (METADATA, PART)
    return {one: files[one] for one in files if one in about or is_piece_below(one, root)}


def _whole(path: Path, root: str | None) -> Path:
    """Return the directory of a downloaded checkpoint, verified; pieces of hosts are joined first.

    Raises:
        TrainingError: it is not as it was written, or its pieces cannot be joined.
    """
    if not (path / PART).exists():
        verify_files(path)
        return path
    join_pieces(path, path / "whole", root)
    return path / "whole"
