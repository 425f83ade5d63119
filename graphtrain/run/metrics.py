"""What a run reports: JSON lines and TensorBoard events, one record a step."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from graphtrain.errors import TrainingError
from graphtrain.importing import import_without

Record = Mapping[str, float | int | None]


class Journal:
    """The metrics of one run; a resumed run goes on where its checkpoint was.

    Records after the checkpoint were written by steps that are now taken again, so they go.
    """

    def __init__(self, directory: Path, *, after: int, tensorboard: bool) -> None:
        """Open the journal.

        Args:
            after: the last step whose records stay.
        """
        self._path = directory / "metrics.jsonl"
        with writing(directory):
            _keep_until(self._path, after)
            self._lines = self._path.open("a")
        self._events_in = directory / "tensorboard" if tensorboard else None
        self._after = after
        self._events: Any = None

    def write(self, record: Record) -> None:
        """Add a record; it has a "step" and numbers.

        Raises:
            TrainingError: it cannot be written.
        """
        with writing(self._path.parent):
            self._lines.write(json.dumps(record) + "\n")
            self._lines.flush()
            if self._events_in is not None:
                self._write_events(self._events_in, record)

    def _write_events(self, directory: Path, record: Record) -> None:
        if self._events is None:
            # Imported here: the first step need not wait for it. It would import PyTorch, which
            # takes seconds where it is installed, to draw its models.
            tensorboard = import_without("tensorboardX", "torch")
            self._events = tensorboard.SummaryWriter(str(directory), purge_step=self._after + 1)
        for name, value in record.items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        with suppress(OSError):  # what could not be flushed has been reported by write
            self._lines.close()
        if self._events is not None:
            self._events.close()


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Say what could not be written, and what to do, instead of a bare error of the system."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{directory} cannot be written ({error.strerror or error}); free space there, or set "
            "run.directory to another place"
        ) from error


def read_journal(directory: Path) -> list[dict[str, Any]]:
    """Records of a run in order; a last line cut short by a kill is left out."""
    records = []
    path = directory / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read_journal(path.parent) if record["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(temporary, path)
