"""Files of a run that begins: config.toml, those of Hugging Face, the journal of metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.config import render
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.run_record import write_run_config
from graphtrain.config.schema import Config
from graphtrain.planning.parameters import ParameterCount
from graphtrain.run.callbacks import Notify
from graphtrain.run.earlier_runs import set_aside, set_metrics_aside
from graphtrain.run.events import RunStart
from graphtrain.run.goodput.timeline import Timeline
from graphtrain.run.initial_weights import InitialWeights
from graphtrain.run.metrics import Journal, JournalPosition, Record, Report
from graphtrain.run.resume import Resumption, schedule_note

if TYPE_CHECKING:
    from graphtrain.run.training_samples import TrainingSamples
    from graphtrain.run.uploads import Uploads


def open_journal(
    config: Config,
    program: ResolvedProgram,
    initial_weights: InitialWeights | None,
    resumption: Resumption,
    parameters: ParameterCount,
    notify_callbacks: Notify,
    stack: ExitStack,
    samples: TrainingSamples | None,
    measure: Callable[[int], Record],
    timeline: Timeline,
) -> tuple[Report, JournalPosition]:
    """Write config.toml, its record and the Hugging Face files, and open the journal of metrics.

    Called only after the first step has been started, when the run can no longer be refused.
    """
    directory, start = Path(config.run.directory), resumption.start
    if resumption.fresh and (earlier := set_aside(directory)):
        warnings.warn(f"moved the earlier run to {earlier}", stacklevel=1)
    if not start and (message := set_metrics_aside(directory)):
        warnings.warn(message, stacklevel=1)
    info = resumption.info if start else None
    if info is not None and (note := schedule_note(config.run, info.identity, start)):
        warnings.warn(note, stacklevel=1)
    with write_errors(directory):
        write_run_config(directory, render(config), start)
    _copy_hf_files(config, initial_weights)
    timeline.open(directory)
    journal = Journal(
        directory,
        after=start,
        tensorboard=config.run.tensorboard,
        written=info.journal if info else None,
    )
    stack.callback(journal.close)
    if samples is not None:
        samples.open(after=start, write_text=journal.write_text)
    on_fewer = program if str(program.target) != config.program.target else None
    notify_callbacks("on_run_start", RunStart(config, directory, start, parameters, on_fewer))

    def write(record: Record) -> None:
        if "loss" in record:
            record = {**record, **measure(int(record["step"] or 0))}
        record = journal.write(record)
        event = "on_step" if "loss" in record else "on_evaluate"
        metrics = {name: value for name, value in record.items() if name != "step"}
        notify_callbacks(event, record["step"], metrics)

    return write, journal.position


def discard_journal(uploads: Uploads | None, start: int) -> tuple[Report, JournalPosition]:
    """Return functions that discard records: metrics are equal on all ranks, rank 0 writes."""
    if uploads is not None:
        uploads.begin(start)
    return lambda record: None, lambda: None


def measure_nothing(step: int) -> Record:
    """Return no metrics."""
    return {}


def _copy_hf_files(config: Config, initial_weights: InitialWeights | None) -> None:
    """Copy the tokenizer and the Hugging Face files of the weights into the run directory.

    graphtrain convert graphtrain-to-hf exports them with the trained weights.
    """
    from graphtrain.weights.hf_record import record_hf_files, verify_hf_files
    from graphtrain.weights.sources import HF_FILES
    from graphtrain.weights.tokenizer import copy_tokenizer

    run = config.run
    directory = Path(run.directory)
    verify_hf_files(directory)
    if initial_weights is not None:
        initial_weights.save_run_files(directory)
    with write_errors(directory):
        copy_tokenizer(run.data.local.train_datasets[0], directory / HF_FILES)
        record_hf_files(directory)
