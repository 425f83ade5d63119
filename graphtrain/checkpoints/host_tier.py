"""Checkpoints on a disk, or RAM disk, of one host: the pieces of its own devices.

    own/40/manifest.json              size and digest of the files below; written last
    own/40/about/metadata             as of a checkpoint that all hosts share
    own/40/about/part.json            which part this is, and of which save
    own/40/about/…, own/40/pieces/…   see `graphtrain.checkpoints.pieces`
    own/40/complete                   every host had written its part; not in the manifest
    copies/40/…                       the same of another host

A directory appears with its manifest, by renaming. A step can be restored if the parts that hosts
still have are together all pieces of one save. Parts of two saves of one step are never joined.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.cache.writing import sync_directory
from graphtrain.checkpoints.manifest import (
    DamagedCheckpoint,
    is_intact,
    recorded_digests,
    verify_files,
    write_manifest,
)
from graphtrain.checkpoints.pieces import write_pieces
from graphtrain.files import validate
from sharding_rules.documents import DocumentError, read_object

METADATA, PART, _COMPLETE = "about/metadata", "about/part.json", "complete"
OWN, COPIES = "own", "copies"
_UNFINISHED, _DELETED = ".unfinished", ".deleted"  # ends of names while a part is written, deleted
_STEP = re.compile(r"[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True)
class Part:
    """Pieces of a step that one host holds, without their contents."""

    save: str  # identifies the save; equal on all hosts
    group: int  # parts of equal groups have the same pieces
    groups: int  # number of groups, all of which a complete step has
    shapes: dict[str, list[int]]  # of the pieces of each array, by its path


@dataclass(frozen=True)
class HeldPart:
    """A part on this host whose metadata are sound."""

    directory: Path
    part: Part
    is_complete: bool  # every host had written its part

    @property
    def step(self) -> int:
        return int(self.directory.name)


class HostTier:
    """Parts of checkpoints on a disk of this host.

    Args:
        directory: The directory `run.checkpoints.local`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        # Files in the manifest of a part, by its directory and save.
        self._entries: dict[tuple[Path, str], Mapping[str, Mapping[str, object]]] = {}

    def own(self, step: int) -> Path:
        """Return the directory of this host's part of a step."""
        return self.directory / OWN / str(step)

    def parts(self) -> list[HeldPart]:
        """Return the parts on this host, oldest first; one that is damaged is a warning."""
        found = []
        for folder in (OWN, COPIES):
            for path in self._steps(folder):
                try:
                    verify_files(path, only="about/")
                    part = validate(Part, read_object(path / PART))
                except (DamagedCheckpoint, OSError, ValueError) as error:
                    reason = error.reason if isinstance(error, DamagedCheckpoint) else error
                    warnings.warn(f"{path} is damaged: {reason}; it is not used", stacklevel=1)
                    continue
                found.append(HeldPart(path, part, (path / _COMPLETE).exists()))
        return sorted(found, key=lambda one: one.step)

    def steps(self) -> list[int]:
        """Return the steps of which this host has a part, or a copy of one, oldest first."""
        return sorted({int(path.name) for folder in (OWN, COPIES) for path in self._steps(folder)})

    def write(
        self, step: int, part: Part, metadata: Mapping[str, Any], pieces: dict[str, np.ndarray]
    ) -> None:
        """Write the part of this host.

        Raises:
            OSError: a file cannot be written.
        """
        self._remove_leftovers()
        with self._new(OWN, step) as directory:
            (directory / METADATA).parent.mkdir()
            (directory / METADATA).write_text(json.dumps(metadata))
            (directory / PART).write_text(json.dumps(asdict(part)))
            write_pieces(directory, pieces)

    def copy(self, step: int, names: Iterator[tuple[str, bytes]]) -> None:
        """Write the part of another host: its files, with their content.

        Raises:
            OSError: a file cannot be written.
        """
        with self._new(COPIES, step) as directory:
            for name, content in names:
                path = directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def set_complete(self, step: int) -> None:
        """Record that every host has written its part."""
        for folder in (OWN, COPIES):
            if (path := self.directory / folder / str(step)).is_dir():
                (path / _COMPLETE).touch()
                sync_directory(path)

    def remove_others(self, newest: int, keep: int, in_use: Collection[int] = ()) -> None:
        """Delete all but the newest steps, of which the last is `newest`, and those in use.

        Parts of later steps are those of a start whose disks were lost, and from before which the
        run has gone on.
        """
        for folder in (OWN, COPIES):
            paths = self._steps(folder)
            kept = [path for path in paths if int(path.name) <= newest][-keep:]
            for path in paths:
                if path not in kept and int(path.name) not in in_use:
                    self._remove(path)

    def set_aside(self, step: int) -> Path:
        """Move the parts of a step that cannot be restored to the folder `quarantine`.

        What was there is deleted: a RAM disk has room for one.
        """
        quarantine = self.directory / "quarantine"
        shutil.rmtree(quarantine, ignore_errors=True)
        for folder in (OWN, COPIES):
            path = self.directory / folder / str(step)
            if path.is_dir():
                destination = quarantine / folder / str(step)
                destination.parent.mkdir(parents=True, exist_ok=True)
                os.rename(path, destination)
        return quarantine

    def names(self, step: int, save: str) -> list[str] | None:
        """Return the files of this host's own part of a save; None if there is none."""
        return sorted(self._entries_of(self.own(step), save)) or None

    def read(self, step: int, save: str, name: str) -> bytes | None:
        """Return the content of a file of a save; None if no sound one is here.

        Damage is a warning.
        """
        content, damaged = self.look_up(step, save, name)
        for path in damaged:
            warnings.warn(
                f"{path} is damaged: its content does not have the digest it was written with; "
                "another copy of it is looked for, here and on the other hosts",
                stacklevel=1,
            )
        return content

    def look_up(self, step: int, save: str, name: str) -> tuple[bytes | None, list[Path]]:
        """Return the content of a file of a save, and the damaged files that should have it.

        The copy of another host's part may have the file too.
        """
        damaged = []
        for path, entry in self._found(step, save, name):
            with suppress(OSError):
                content = path.read_bytes()
                if is_intact(content, entry):
                    return content, damaged
            damaged.append(path)
        return None, damaged

    def _found(
        self, step: int, save: str, name: str
    ) -> Iterator[tuple[Path, Mapping[str, object]]]:
        """Yield the paths of a file of a save, each with its size and digest."""
        for folder in (OWN, COPIES):
            directory = self.directory / folder / str(step)
            entries = self._entries_of(directory, save)
            if name in entries:
                yield directory / name, entries[name]

    def _entries_of(self, directory: Path, save: str) -> Mapping[str, Mapping[str, object]]:
        """Return the files of a part, if it is of a save."""
        try:
            part = validate(Part, read_object(directory / PART))
            if part.save != save:
                return {}
            if (directory, save) not in self._entries:
                self._entries[directory, save] = recorded_digests(directory)
            return self._entries[directory, save]
        except (DamagedCheckpoint, DocumentError, OSError, ValueError):
            return {}

    def _steps(self, folder: str) -> list[Path]:
        directory = self.directory / folder
        found = [path for path in directory.glob("*") if _STEP.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name))

    def _new(self, folder: str, step: int) -> _NewPart:
        return _NewPart(self.directory / folder / str(step), self._remove)

    def _remove(self, path: Path) -> None:
        """Delete a part; it disappears at once, whenever the deletion is interrupted."""
        for key in list(self._entries):  # a copy: threads that serve peers add entries meanwhile
            if key[0] == path:
                self._entries.pop(key, None)
        removed = path.with_name(f"{path.name}{_DELETED}")
        shutil.rmtree(removed, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(path, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Delete what processes that were killed had not finished, of any step: it takes room."""
        for folder in (OWN, COPIES):
            for path in (self.directory / folder).glob("*"):
                if path.suffix in (_UNFINISHED, _DELETED):
                    shutil.rmtree(path, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Flush a part to disk: the steps before it are deleted, and the host may lose power."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))


@dataclass
class _NewPart:
    """Context in which a part is written beside its place; it takes it when it is complete."""

    path: Path
    remove: Callable[[Path], None]

    def __enter__(self) -> Path:
        self._unfinished = self.path.with_name(f"{self.path.name}{_UNFINISHED}")
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)
        return self._unfinished

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                write_manifest(self._unfinished)
                _sync(self._unfinished)
                self.remove(self.path)  # of an earlier save of this step
                os.rename(self._unfinished, self.path)
                sync_directory(self.path.parent)
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)
