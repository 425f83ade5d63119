"""Metrics of a run: one record per step, as JSON lines and TensorBoard events."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphtrain.files import atomic_write, write_errors
from lowering.machine import startup

Record = Mapping[str, float | int | None]


class Journal:
    """Writer of the metrics of one run.

    When a run resumes, records after its checkpoint are deleted, because their steps run again.
    """

    def __init__(self, directory: Path, *, after: int, tensorboard: bool) -> None:
        """Open the journal, and delete the records of later steps.

        Args:
            directory: Directory of the run.
            after: Last step whose records are kept.
            tensorboard: Whether to write TensorBoard events too.
        """
        self._path = directory / "metrics.jsonl"
        with write_errors(directory):
            _drop_records_after(self._path, after)
            self._jsonl_file = self._path.open("a")
        self._tensorboard_dir = directory / "tensorboard" if tensorboard else None
        self._after = after
        self._tensorboard_writer: Any = None

    def write(self, record: Record) -> None:
        """Append a record, which contains "step" and metrics by name.

        Raises:
            TrainingError: the record cannot be written.
        """
        with write_errors(self._path.parent):
            self._jsonl_file.write(json.dumps(record) + "\n")
            self._jsonl_file.flush()
            if self._tensorboard_dir is not None:
                self._write_events(self._tensorboard_dir, record)

    def _write_events(self, directory: Path, record: Record) -> None:
        if self._tensorboard_writer is None:
            # Imported late, so as not to delay the first step, and without PyTorch, which it would
            # import (seconds, if installed) only to draw PyTorch models.
            tensorboard = startup.import_without("tensorboardX", "torch")
            self._tensorboard_writer = tensorboard.SummaryWriter(
                str(directory), purge_step=self._after + 1
            )
        for name, value in record.items():
            if name != "step" and value is not None:
                self._tensorboard_writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        with suppress(OSError):  # write() has reported what could not be flushed
            self._jsonl_file.close()
        if self._tensorboard_writer is not None:
            self._tensorboard_writer.close()


def read_journal(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run in order, without a last line that was written only in part."""
    records = []
    path = directory / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _drop_records_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    records = [record for record in read_journal(path.parent) if record["step"] <= step]
    with atomic_write(path) as file:
        file.write("".join(json.dumps(record) + "\n" for record in records).encode())
