"""Join the pieces of a step, which hosts saved each for itself, to a checkpoint as all others are.

It is done by a process of its own, on the CPU and one array at a time: Orbax would wait for the
other processes of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.host_tier import METADATA, PART, Part
from graphtrain.checkpoints.manifest import write_manifest
from graphtrain.checkpoints.pieces import assemble
from graphtrain.checkpoints.side_process import read_events, read_job, report, start_process
from graphtrain.checkpoints.written_arrays import chunks_of, dtype_of, write_zeros
from graphtrain.errors import TrainingError
from graphtrain.files import validate
from sharding_rules.documents import read_object

MODULE = __name__
_REMEMBERED = 64  # pieces of an array, while the chunks that they overlap are written


@dataclass(frozen=True)
class _Job:
    source: str
    destination: str
    root: str | None


def join_pieces(source: Path, destination: Path, root: str | None = None) -> None:
    """Write a checkpoint with its manifest from the pieces of a step.

    Args:
        source: Directory with the metadata and all pieces of the step, which are verified.
        destination: Directory to create.
        root: Path in the state below which the arrays are that the checkpoint gets; None for all.

    Raises:
        TrainingError: it cannot be written, or a piece is missing.
    """
    job = _Job(str(source), str(destination), root)
    process = start_process(MODULE, job, {"JAX_PLATFORMS": "cpu"})
    told, _ = process.communicate()
    reasons = [event["error"] for event in read_events(told.splitlines()) if "error" in event]
    if reasons or process.returncode:
        reason = reasons[0] if reasons else f"its process ended with status {process.returncode}"
        raise TrainingError(f"the pieces in {source} cannot be joined to a checkpoint: {reason}")


def _join(source: Path, destination: Path, root: str | None) -> None:
    metadata = read_object(source / METADATA)
    if root is not None:
        arrays = metadata["arrays"]
        metadata["arrays"] = {path: arrays[path] for path in arrays if path.startswith(f"{root}/")}
    shapes = validate(Part, read_object(source / PART)).shapes
    write_zeros(destination, metadata["arrays"], metadata)
    for path, (shape, dtype) in metadata["arrays"].items():
        read, array = _reader(source), private_orbax.open_array(destination, path, write=True)
        of_pieces = tuple(shape), tuple(shapes[path]), dtype_of(dtype)
        for index in chunks_of(array):
            array[index].write(assemble(path, index, *of_pieces, read)).result()
    write_manifest(destination)


def _reader(source: Path) -> Callable[[str], bytes]:
    return lru_cache(_REMEMBERED)(lambda name: (source / name).read_bytes())


def main() -> None:
    """Join, and report why that failed."""
    job = read_job(_Job)
    try:
        _join(Path(job.source), Path(job.destination), job.root)
    except (OSError, ValueError, KeyError) as error:
        report(error=str(error))


if __name__ == "__main__":
    main()
