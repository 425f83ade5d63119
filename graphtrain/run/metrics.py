"""Metrics of a run: one record per step, as JSON lines and TensorBoard events."""

import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.errors import TrainingError
from graphtrain.files import atomic_write
from graphtrain.run.event_file import EventFile
from sharding_rules.documents import DocumentError, read_bytes

Record = Mapping[str, float | int | None]
Report = Callable[[Record], None]
JournalPosition = Callable[[], dict[str, Any] | None]
METRICS_NAME = "metrics.jsonl"
_DIGITS = 6  # written of a measured value
# A float32 is read back exactly from nine digits; a mean of float32 in float64 is written in full.
_EXACT_DIGITS = {
    "loss": 9,
    "margin": 9,
    "accuracy": 9,
    "grad_norm": 9,
    "parameter_norm": 9,  # .MODULE
    "update_norm": 9,
    "learning_rate": 9,
    "loss_scale": 17,
    "validation_loss": 17,
    "averaged_validation_loss": 17,
}
_MAX_BYTES = 16 << 30  # a record has some 300 bytes

# Every name in a record, with its meaning; docs/reference/metrics.md is made from it.
METRICS = {
    "step": "number of completed optimizer steps",
    "loss": "training loss of the batch: cross-entropy in nats per target; with DPO, per pair",
    "margin": "DPO: mean difference between the rewards of a chosen and a rejected answer",
    "accuracy": "DPO: share of pairs whose chosen answer has the higher reward",
    "balance_loss": "mixtures of experts: load-balancing loss, without its weight",
    "router_z_loss": "mixtures: z-loss of the routers, without its weight",
    "expert_load_max": "mixtures: tokens of the busiest expert over the mean; mean of all layers",
    "expert_load_min": "mixtures: the same of the least busy expert; 0 if it gets no token",
    "dropped_choices": "mixtures with a capacity: fraction of the expert choices that are dropped",
    "mtp_loss": "with program.model.mtp_loss_weight: loss of the token after the next, unweighted",
    "grad_norm": "norm of all gradients together, before clipping; null if it is not finite",
    "loss_scale": "float16: factor of the loss in this step, with a dynamic scale",
    "skipped_steps": "float16: number of steps so far that were skipped because of an overflow",
    "spike": "with program.optimizer.skip_spikes: 1 if the step was a spike, and skipped",
    "parameter_norm.MODULE": "with program.optimizer.group_norms: norm of a module before the step",
    "update_norm.MODULE": "the same: norm of what the step adds to them, learning rate included",
    "learning_rate": "learning rate of the step",
    "targets": "number of tokens of the batch that count in the loss",
    "step_seconds": "seconds between the end of the previous step and the end of this one",
    "data_wait_seconds": "seconds of the step in which the training loop waited for its batch",
    "tokens_per_second": "tokens of the batch, with padding, divided by step_seconds",
    "mfu": "model FLOP utilization, with attention scores counted in full; null if unknown",
    "mfu_causal": "the same, with the half of the scores that a causal mask leaves",
    "memory_bytes": "memory in use on the fullest device of rank 0; on a CPU, of its process",
    "upload_lag_steps": "steps since the newest checkpoint in run.checkpoints.remote",
    "validation_loss": "mean loss of the validation data; in a record of its own, with step",
    "averaged_validation_loss": "with program.optimizer.ema_decay: that of the averaged weights",
    "TASK/METRIC": "score on a task of run.tasks, for example boolq/acc; in a record of its own",
}


class Journal:
    """Writer of the metrics of one run.

    When a run resumes, records after its checkpoint are deleted, because their steps run again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        after: int,
        tensorboard: bool,
        written: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the journal, and delete the records of later steps.

        Args:
            directory: Directory of the run.
            after: Last step whose records are kept.
            tensorboard: Whether to write TensorBoard events too.
            written: What `position` returned when the checkpoint was saved. A journal that does
                not begin with it is damaged: it is copied, with a warning, and its readable records
                are kept. One that is missing is a warning.
        """
        self._path = directory / METRICS_NAME
        with write_errors(directory):
            kept = _drop_records_after(self._path, after, written)
            self._jsonl_file = self._path.open("a")
        self._digest, self._bytes = hashlib.sha256(kept), len(kept)
        self._event_directory = directory / "tensorboard" if tensorboard else None
        self._after = after
        self._event_file: EventFile | None = None

    def write(self, record: Record) -> Record:
        """Append a record, which contains "step" and metrics by name.

        Returns:
            The record as it was written, without meaningless digits.

        Raises:
            TrainingError: the record cannot be written.
        """
        record = {name: _rounded(name, value) for name, value in record.items()}
        line = json.dumps(record) + "\n"
        with write_errors(self._path.parent):
            self._jsonl_file.write(line)
            self._jsonl_file.flush()
            if self._event_directory is not None:
                metrics = {name: value for name, value in record.items() if name != "step"}
                self._events(self._event_directory).write(int(record["step"] or 0), metrics)
        self._digest.update(line.encode())
        self._bytes += len(line.encode())
        return record

    def write_text(self, step: int, name: str, text: str) -> None:
        """Append a text in Markdown to the TensorBoard events, if they are written.

        Raises:
            TrainingError: it cannot be written.
        """
        if self._event_directory is not None:
            with write_errors(self._path.parent):
                self._events(self._event_directory).write_text(step, name, text)

    def _events(self, directory: Path) -> EventFile:
        """Return the event file, which is opened late, so as not to delay the first step."""
        if self._event_file is None:
            self._event_file = EventFile(directory, self._after + 1)
        return self._event_file

    def position(self) -> dict[str, Any]:
        """Return size and digest of everything written so far, as JSON."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        with suppress(OSError):  # write() has reported what could not be flushed
            self._jsonl_file.close()
        if self._event_file is not None:
            self._event_file.close()


def _rounded(name: str, value: float | int | None) -> float | int | None:
    """Return a metric with as many significant digits as it has a meaning."""
    if not isinstance(value, float):
        return value
    digits = _EXACT_DIGITS.get(name.partition(".")[0], _DIGITS)
    return float(f"{value:.{digits}g}")


def has_scores(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of an evaluation of tasks, whose metrics are "TASK/METRIC"."""
    return any("/" in name for name in record)


def read_journal(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run in order, without a last line that was written only in part.

    Lines that are no record are skipped, with one warning for all of them.
    """
    path = directory / METRICS_NAME
    records, damaged = _parse(_content(path))
    if damaged:
        lines = ", ".join(map(str, damaged[:10]))
        warnings.warn(  # from one place, so that it is shown once however many read the file
            f"{path}: {len(damaged)} damaged lines are left out (line {lines})", stacklevel=1
        )
    return records


def good_steps(records: list[dict[str, Any]]) -> set[int]:
    """Return the steps whose state is known to be good: it gave a finite loss.

    The loss of step n + 1 is that of the state after step n, and so is an evaluation at step n.
    """
    trained = {record["step"] - 1 for record in records if record.get("loss") is not None}
    return trained | {
        record["step"]
        for record in records
        if (loss := record.get("validation_loss")) is not None and math.isfinite(loss)
    }


def _parse(content: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the records of a journal, and the numbers of the damaged lines, from 1."""
    records, damaged = [], []
    lines = content.split(b"\n")[:-1]  # the last has no end: it is empty, or written in part
    for number, line in enumerate(lines, 1):
        record = parse_record(line)
        if record is None:
            damaged.append(number)
        else:
            records.append(record)
    return records, damaged


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of a journal; None if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if _is_record(record) else None


def _content(path: Path) -> bytes:
    """Return the content of a journal, which is empty if there is none.

    Raises:
        TrainingError: it cannot be read.
    """
    if not path.exists():
        return b""
    try:
        return read_bytes(path, _MAX_BYTES)
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TrainingError(f"{path}: cannot be read: {reason}") from None


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("step")) is int
        and value["step"] >= 0
        and all(map(_is_number_or_none, value.values()))
    )


def _is_number_or_none(value: Any) -> bool:
    is_integer = type(value) is int and value.bit_length() < 64
    return value is None or is_integer or type(value) is float


def _drop_records_after(path: Path, step: int, written: Mapping[str, Any] | None) -> bytes:
    """Rewrite the journal without later records, and return its content."""
    if written is not None and written["bytes"] and not path.exists():
        warnings.warn(
            f"{path} is missing, and with it the metrics up to step {step}: it was removed, or the "
            "checkpoint is that of a run in another directory; the metrics begin anew",
            stacklevel=3,
        )
        return b""
    content = _content(path)
    records, damaged = _parse(content)
    if damaged or (written is not None and not _begins_with(content, written)):
        copy = path.with_name(f"metrics.{step}.damaged.jsonl")
        shutil.copyfile(path, copy)
        where = f"line {', '.join(map(str, damaged[:10]))}" if damaged else f"up to step {step}"
        warnings.warn(
            f"{path} is not as this run wrote it ({where}); kept a copy in {copy.name}, and the "
            "records that can be read",
            stacklevel=3,
        )
    kept = "".join(json.dumps(r) + "\n" for r in records if r["step"] <= step).encode()
    if content:
        with atomic_write(path) as file:
            file.write(kept)
    return kept


def _begins_with(content: bytes, written: Mapping[str, Any]) -> bool:
    beginning = content[: written["bytes"]]
    return hashlib.sha256(beginning).hexdigest() == written["sha256"]
