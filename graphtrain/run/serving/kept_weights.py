"""Weights as programs serve them, kept in the run's directory, so that the next start maps them.

A checkpoint holds the weights in float32 and in the layout of training; to serve them, they are
read, cast and split by layers. The result is kept in RUN/serving/KEY: a .npy file for each array,
whose data NumPy aligns so that JAX uses the mapped file as it is, and a manifest. The key is made
from the digests of the weights and of the program that cast them. One process writes at a time;
a server beside it keeps none.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Generator
from pathlib import Path

import numpy as np

import lowering
from graphtrain.checkpoints.manifest import NAME as MANIFEST
from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files, write_manifest
from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.errors import WeightsError
from graphtrain.files import content_digest, json_digest
from graphtrain.weights.digests import NAME as WEIGHTS_RECORD
from lowering.machine.leases import Lease
from lowering.trees import Tree, flatten
from lowering.xla import distributed

FOLDER = "serving"  # in the directory of a run
_LEASE = ".lease"  # in it: of the process that writes
_KEY_LENGTH = 32
_SPARE_BYTES = 1 << 30  # that stay free on the disk


class KeptWeights:
    """Weights of one checkpoint, as one program serves them.

    Args:
        directory: Directory of the run.
        key: What the weights were made from.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.folder = directory / FOLDER / key

    def read(self, program: ResolvedProgram, described: Tree) -> Tree | None:
        """Return the weights on the devices, or None if they are not kept.

        Args:
            program: The program that serves them.
            described: Shapes, dtypes and shardings of the weights.

        Raises:
            DamagedCheckpoint: a file is not as it was written.
        """
        if not self.folder.is_dir():
            return None
        verify_files(self.folder)

        def part(path: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
            stored = np.load(self._file(self.folder, path), mmap_mode="r")
            dtype = flat[path].dtype  # NumPy stores dtypes that are not its own as bytes
            return np.asarray(stored).view(dtype).reshape(shape)[index]

        flat = flatten(described)
        try:
            return lowering.backend(program.target).from_shards(described, part)
        except (OSError, ValueError) as error:  # for example: replaced by another server just now
            raise DamagedCheckpoint(self.folder, f"it cannot be read ({error})") from None

    def keep(self, program: ResolvedProgram, weights: Tree) -> Generator[str, None, None]:
        """Write the weights for the next start, or warn why not; yield the name of each array."""
        if not self.has_room_for(weights):
            warnings.warn(
                f"no room to keep weights for the next start: {self.folder}", stacklevel=2
            )
            return
        try:
            yield from self.write(program, weights)
        except WeightsError as error:
            warnings.warn(f"no weights are kept for the next start: {error}", stacklevel=2)

    def write(self, program: ResolvedProgram, weights: Tree) -> Generator[str, None, None]:
        """Write the weights in place of others that were kept; yield the name of each array.

        If another process writes weights of this run now, or has kept these, nothing is written.

        Raises:
            WeightsError: the directory cannot be written.
        """
        lease = Lease(self.folder.parent / _LEASE)
        try:
            if not lease.try_acquire():
                return
        except OSError as error:
            raise WeightsError(f"{self.folder} cannot be written: {error}") from error
        try:
            if not self.folder.is_dir():
                yield from self._write(program, weights)
        finally:
            lease.release()

    def _write(self, program: ResolvedProgram, weights: Tree) -> Generator[str, None, None]:
        arrays = flatten(lowering.backend(program.target).checkpoint_arrays(weights))
        with create_directory(self.folder) as unfinished:
            for path, array in arrays.items():
                file = self._file(unfinished, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                np.save(file, np.asarray(array))
                yield path
            write_manifest(unfinished)
        for other in self.folder.parent.iterdir():
            if other not in (self.folder, self.folder.parent / _LEASE):
                # Mapped files stay readable to those who have them open.
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove the weights, if they are kept."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def has_room_for(self, weights: Tree) -> bool:
        """Return whether the disk has room for the weights."""
        size = sum(array.nbytes for array in flatten(weights).values())
        parent = next(one for one in self.folder.parents if one.exists())
        return shutil.disk_usage(parent).free > size + _SPARE_BYTES

    @staticmethod
    def _file(folder: Path, path: str) -> Path:
        return folder / f"{path}.npy"


def kept_weights(
    program: ResolvedProgram, run: Run, step: int | None, graph_digest: str
) -> KeptWeights | None:
    """Return where the weights of a run are kept, or None if they cannot be.

    They are kept if their files have recorded digests, and one process serves them.

    Args:
        program: The program that was trained.
        run: The run.
        step: Step of the checkpoint; None for run.init_from.
        graph_digest: Digest of the program that casts the weights.
    """
    records: list[Path] = []
    if step is not None:
        records.append(Path(run.directory) / "checkpoints" / str(step) / MANIFEST)
    if step is None or program.adapter is not None:
        records.append(Path(run.init_from or "") / WEIGHTS_RECORD)
    if distributed.count() > 1 or not all(record.is_file() for record in records):
        return None
    sources = [content_digest(record) for record in records]
    return KeptWeights(Path(run.directory), json_digest([sources, graph_digest])[:_KEY_LENGTH])
