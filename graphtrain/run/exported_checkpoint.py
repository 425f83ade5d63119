"""Checkpoint that an export reads: in the directory of the run, else in its object store.

Where the hosts of a run share no disk, no directory has a whole one. The weights are then
downloaded beside the folder that is exported, and deleted afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from graphtrain.checkpoints.listing import list_remote
from graphtrain.checkpoints.manifest import NAME as MANIFEST
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.steps import lowest_loss
from graphtrain.errors import TrainingError
from graphtrain.files import content_digest, json_digest

Place = tuple[str, str | None]  # URL of a store, and its endpoint


class ExportedCheckpoint:
    """Checkpoint of a step of a run.

    Args:
        run_directory: Directory of the run.
        step: Step of the checkpoint.
        store: Store of the checkpoints of the run, which is read if the directory has none of the
            step; None if there is no store.
        root: Path in the state below which the exported arrays are.

    Raises:
        TrainingError: neither place has it.
        CacheError: the store cannot be read.
    """

    def __init__(self, run_directory: Path, step: int, store: Place | None, root: str) -> None:
        self._directory, self._step, self._root = run_directory, step, root
        self._manifest = run_directory / "checkpoints" / str(step) / MANIFEST
        self._remote = None
        if store is not None and not self._manifest.exists():
            self._remote = RemoteCheckpoints(*store)
            if step not in self._remote.steps():
                raise TrainingError(
                    f"the hosts share no disk, and step {step} is not in {self._remote.url}, from "
                    "which the weights of all hosts are read: its upload did not end in time "
                    "(run.checkpoints.remote_timeout), or failed"
                )

    @property
    def digest(self) -> str:
        """Digest that no other checkpoint has.

        Raises:
            DamagedRemoteCheckpoint: its manifest in the store is damaged.
            OSError: its manifest cannot be read.
        """
        if self._remote is None:
            return content_digest(self._manifest)
        return json_digest(asdict(self._remote.manifest(self._step)))

    @contextmanager
    def directory(self, temporary: Path) -> Iterator[Path]:
        """Return a directory of the run with the checkpoint: its own, or a temporary one.

        Raises:
            DamagedRemoteCheckpoint: an object in the store is missing, or not as it was uploaded.
            TrainingError: the directory cannot be written.
            CacheError: the store cannot be read.
        """
        if self._remote is None:
            yield self._directory
            return
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        try:
            self._remote.download(self._step, temporary, root=self._root)
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def best_stored_step(store: Place) -> int:
    """Return the step with the lowest validation loss of those in a store.

    Raises:
        TrainingError: no checkpoint there was saved with a validation loss.
        CacheError: the store cannot be read.
    """
    found = list_remote(RemoteCheckpoints(*store))
    losses = {one.step: one.validation_loss for one in found if one.validation_loss is not None}
    if not losses:
        raise TrainingError(f"no checkpoint in {store[0]} was saved with a validation loss")
    return lowest_loss(losses)
