"""Training loop, which runs programs that were compiled before."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import (
    Checkpoints,
    check_directory,
    layer_order_of,
    saved_steps,
)
from graphtrain.config import render
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Config, Program, Run
from graphtrain.cost_model.native_equivalent import sizes_unknown, with_native_model
from graphtrain.errors import TrainingError
from graphtrain.files import write_errors
from graphtrain.models.flops import useful_flops_per_token
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.planning.parameters import ParameterCount, count_compiled_parameters
from graphtrain.run.agreement import check_same_executables, on_all_ranks
from graphtrain.run.batch_placement import BatchPlacement, index_share
from graphtrain.run.callbacks import Callback, check_callbacks, notify
from graphtrain.run.data_check import DataCheck
from graphtrain.run.directory_lock import locked_run_directory
from graphtrain.run.earlier_runs import set_aside, set_metrics_aside
from graphtrain.run.events import RunStart, RunSummary
from graphtrain.run.initial_weights import InitialWeights
from graphtrain.run.learning_rate import learning_rate
from graphtrain.run.log import RunLog
from graphtrain.run.metrics import Journal, Record, good_steps, read_journal
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.resume import Resumption, data_changed, identity_of, schedule_note, write_config
from graphtrain.run.signals import StopRequest, stop_requests
from graphtrain.run.stalls import COMPUTING, DATA, EVALUATING, SAVING
from graphtrain.run.validation_history import ValidationHistory, recorded_history
from graphtrain.run.watchdog import Watchdog, watched
from lowering.machine import host, startup
from lowering.machine.memory_pages import use_huge_pages
from lowering.machine.target import Target
from lowering.trees import Tree
from lowering.xla import distributed
from sharding_rules.errors import ShardingError

Report = Callable[[Record], None]
Notify = Callable[..., None]  # called with the name of an event and its arguments
JournalPosition = Callable[[], dict[str, Any] | None]
_COMMON_METRICS = ("loss", "grad_norm", "targets")  # metrics of every loss function


def train(
    program: ResolvedProgram,
    run: Run,
    cache: Cache,
    *,
    compile_hint: str,
    callbacks: Sequence[Callback] = (),
    allowed_changes: Sequence[str] = (),
    fresh: bool = False,
) -> RunSummary:
    """Train up to run.steps with compiled programs, from the last checkpoint if there is one.

    Args:
        program: the program.
        run: settings of the run.
        cache: cache with the compiled programs.
        compile_hint: command that compiles missing programs, for error messages.
        callbacks: called on rank 0 with what happens.
        allowed_changes: settings whose values may differ from those of the checkpoint.
        fresh: start at step 0; what the directory contains is moved to its folder earlier/.

    Raises:
        CallbackError: a callback cannot be used, or raised an exception.
        MissingProgram: a graph is not in the cache.
        TrainingError: the loss is not finite, the directory of the run cannot be used, or its
            checkpoints are damaged or of another run.
        DataError: a dataset cannot be used.
        WeightsError: the initial weights cannot be used.
    """
    check_callbacks(callbacks)
    directory = Path(run.directory)
    check_directory(directory)
    is_rank_zero = distributed.rank() == 0  # rank 0 writes the files that all ranks share
    log = RunLog(directory, run.steps, run.report_every)
    notify_callbacks = partial(notify, [log, *callbacks] if is_rank_zero else ())
    with ExitStack() as stack:
        stack.enter_context(log.recording())
        watchdog = stack.enter_context(watched(run.watchdog, directory))
        on_all_ranks(
            lambda: stack.enter_context(locked_run_directory(directory)) if is_rank_zero else None
        )
        config = Config(program=program.settings, run=run)
        identity = on_all_ranks(lambda: identity_of(config))
        resumption = Resumption(directory, identity, allowed_changes, fresh=fresh)
        saved = bool(resumption.steps)
        history = recorded_history(directory, resumption.start)
        evaluation_owed = saved and is_evaluation_owed(run, resumption.start)
        stalled = history.has_stalled(run.early_stopping_patience)
        if (resumption.start >= run.steps or stalled) and not evaluation_owed:
            start = resumption.start
            return RunSummary(directory, start, start, None, None, history.best_step, stalled)
        initial_weights = on_all_ranks(lambda: InitialWeights.open(program, run, resuming=saved))
        names = needed_graphs(run, resuming=saved)
        programs = on_all_ranks(lambda: LoadedPrograms(program, cache, names, compile_hint))
        check_same_executables(programs)
        prefault = _preallocate_memory(programs, program.target)
        stack.callback(prefault.stop)
        if distributed.count() > 1:  # a failure to load on one rank ends all, before any computes
            on_all_ranks(lambda: [programs[name] for name in names])
        stop = stack.enter_context(stop_requests())
        if stop.should_stop():  # while the programs were loaded
            return _stopped_while_loading(stop, directory, resumption.start)
        stack.enter_context(lowering.backend(program.target).forbid_tracing())
        prefaulted_bytes = prefault.stop()
        baseline_bytes = host.reset_peak() - prefaulted_bytes
        checkpoints = Checkpoints(
            directory / "checkpoints",
            run.keep_checkpoints,
            layer_order_of(program),
            keep_best=run.keep_best,
        )
        stack.callback(checkpoints.close)
        restored = None
        if saved:
            restored = resumption.restore(checkpoints, programs["train"].inputs("state"))
            state = restored.state
        else:
            state = _init_state(programs, run.seed)
        if stop.should_stop():  # while a checkpoint was restored
            return _stopped_while_loading(stop, directory, resumption.start)
        start, changes = resumption.start, resumption.changes()
        data_check = on_all_ranks(lambda: DataCheck(run.data))  # while the devices compute init
        placement = BatchPlacement(programs["train"].inputs("batch"), program.target)
        loader = _open_data(run, program.settings, placement, stack)
        if not saved and initial_weights is not None:
            state = _load_initial_weights(initial_weights, programs, state)
        step = programs["train"]
        frozen = ()
        if initial_weights is not None and has_frozen_weights(program.settings):
            frozen = (initial_weights.frozen(step.inputs("frozen")),)
        if restored is not None:
            position = restored.data_position
            if data_changed(changes, start):
                position = loader.state() | {"step": position["step"]}
            loader.restore(position)
        if is_rank_zero:
            stack.callback(
                _record_measurements, program, run, cache, programs, start, baseline_bytes
            )
            stack.callback(data_check.close)
            data_check.start()
        new_run_weights = None if saved else initial_weights
        open_journal = (
            partial(
                _open_journal,
                config,
                new_run_weights,
                resumption,
                count_compiled_parameters(program, step.record),
                notify_callbacks,
                stack,
            )
            if is_rank_zero
            else _discard_journal
        )
        loop = TrainingLoop(
            program,
            run,
            programs,
            frozen,
            loader,
            placement,
            checkpoints,
            open_journal,
            notify_callbacks,
            start,
            data_check,
            {"identity": identity, "changes": changes},
            stop,
            watchdog,
            history,
        )
        startup.resume_garbage_collection()
        watchdog.collective = largest_collective(step.record)
        with watchdog.reporting_errors():
            return loop.run_steps(state, evaluate_first=evaluation_owed)


def needed_graphs(run: Run, *, resuming: bool) -> list[str]:
    """Return the graphs that a run executes: a resumed one needs no initial state."""
    evaluates = run.data.validation is not None
    return [*([] if resuming else ["init"]), "train", *(["evaluate"] if evaluates else [])]


def _stopped_while_loading(stop: StopRequest, directory: Path, start: int) -> RunSummary:
    """Return the outcome of a run that is asked to stop before its first step."""
    assert stop.signal is not None
    return RunSummary(directory, start, start or None, None, stop.signal.name)


def _preallocate_memory(programs: LoadedPrograms, target: Target) -> startup.MemoryPrefault:
    """Start to allocate the peak memory of a CPU run, in parallel to the import of JAX."""
    local_devices = target.devices // (target.processes or 1) if target.platform == "cpu" else 0
    return startup.MemoryPrefault(programs.peak_bytes() * local_devices)


def _init_state(programs: LoadedPrograms, seed: int) -> Tree:
    """Start to compute the initial state with random weights; meanwhile load the train graph."""
    state = programs["init"](np.uint32(seed))["state"]
    programs["train"]
    return state


def _load_initial_weights(
    initial_weights: InitialWeights, programs: LoadedPrograms, state: Tree
) -> Tree:
    """Return the state with its random weights replaced by the initial weights.

    The random weights are freed first, to limit the peak memory.
    """
    other_state = {name: tree for name, tree in state.items() if name != "parameters"}
    # New LoRA adapters keep their random initialization.
    new = state["parameters"] if initial_weights.program.adapter is not None else None
    state.clear()
    described = programs["train"].inputs("state")["parameters"]
    return other_state | {"parameters": initial_weights.parameters(described, new)}


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
    data = run.data.train if isinstance(run.data.train, str) else run.data.train[0].dataset
    with write_errors(directory):
        copy_tokenizer(data, directory / HF_FILES)
        record_hf_files(directory)


def _open_journal(
    config: Config,
    initial_weights: InitialWeights | None,
    resumption: Resumption,
    parameters: ParameterCount,
    notify_callbacks: Notify,
    stack: ExitStack,
) -> tuple[Report, JournalPosition]:
    """Write config.toml and the Hugging Face files, and open the journal of metrics.

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
        write_config(directory, render(config), start)
    _copy_hf_files(config, initial_weights)
    journal = Journal(
        directory,
        after=start,
        tensorboard=config.run.tensorboard,
        written=info.journal if info else None,
    )
    stack.callback(journal.close)
    notify_callbacks("on_run_start", RunStart(config, directory, start, parameters))

    def write(record: Record) -> None:
        journal.write(record)
        event = "on_evaluate" if "validation_loss" in record else "on_step"
        metrics = {name: value for name, value in record.items() if name != "step"}
        notify_callbacks(event, record["step"], metrics)

    return write, journal.position


def _discard_journal() -> tuple[Report, JournalPosition]:
    """Return functions that discard records: metrics are equal on all ranks, rank 0 writes."""
    return lambda record: None, lambda: None


def _open_data(run: Run, program: Program, placement: BatchPlacement, stack: ExitStack) -> Any:
    """Check the validation set, then return the training data loader, which `stack` closes."""

    def open_loader() -> Any:
        from graphtrain.data.batches.loader import Loader

        if run.data.validation is not None:
            from graphtrain.run.evaluate import check_validation

            batches = _validation(run, program)  # opens it on every rank
            if distributed.rank() == 0:
                check_validation(batches, program)
        return Loader(
            run.data.train,
            global_batch_size=program.batch.global_batch_size,
            seq_len=program.batch.seq_len,
            seed=run.seed,
            vocab=program.model.vocab_tokens,
            isolate_documents=not program.batch.cross_document_attention,
            packing=run.data.packing,
            overlong=run.data.overlong,
            pairs=program.loss.kind == "dpo",
            rows=placement.rows,
            index_share=index_share(),
        )

    loader = on_all_ranks(open_loader)
    stack.callback(loader.close)
    return loader


def _validation(
    run: Run, program: Program, rows: np.ndarray | None = None
) -> Iterable[dict[str, np.ndarray]]:
    from graphtrain.run.evaluate import validation_batches

    return validation_batches(
        run.data,
        program,
        program.model.vocab_tokens,
        run.evaluate_batches,
        rows=rows,
        share=index_share(),
    )


def is_evaluation_due(run: Run, step: int) -> bool:
    """Return whether the run evaluates after a step."""
    every = run.evaluate_every
    return step == run.steps or bool(every and step % every == 0)


def is_evaluation_owed(run: Run, start: int) -> bool:
    """Return whether the evaluation after step `start` is due, but the journal has no result.

    A run that is stopped during an evaluation gives it up. All ranks decide as rank 0 does.
    """
    if run.data.validation is None or not is_evaluation_due(run, start):
        return False
    journal = read_journal(Path(run.directory)) if distributed.rank() == 0 else []
    is_recorded = any(record["step"] == start and "validation_loss" in record for record in journal)
    return not distributed.all_gather_text("recorded" if is_recorded else "")[0]


def largest_collective(record: Mapping[str, Any]) -> str:
    """Describe the collective of a program that sends most, for messages; empty without any.

    Which collective a rank waits in is known to the device only: programs overlap them.
    """
    collectives = record.get("collectives")
    if not collectives:
        return ""
    largest = collectives[0]  # they are sorted by the bytes that they send
    axes = ", ".join(largest.get("axes", ()))
    return f"probably in one of its collectives (the largest: {largest['op']} over {axes})"


def _record_measurements(
    program: ResolvedProgram,
    run: Run,
    cache: Cache,
    programs: LoadedPrograms,
    start: int,
    baseline_bytes: int,
) -> None:
    """Record the measured time and memory in the ledger, however the run ended.

    The ledger calibrates the estimates of graphtrain plan. A failure to write it is a warning.
    """
    from graphtrain.planning.measured import record_run

    steps = [record for record in read_journal(Path(run.directory)) if record["step"] > start]
    if not steps or sizes_unknown(program.settings):
        return
    target = program.target
    peak = lowering.backend(target).peak_memory()
    # CPU devices share the memory of the process, part of which was in use before training.
    device_bytes = (peak - baseline_bytes) / target.devices if target.runs_on_cpu else peak
    try:
        record_run(cache.root, program, programs["train"].record, steps, device_bytes)
    except (OSError, ShardingError) as error:
        warnings.warn(
            f"the measurements of this run were not recorded in the ledger of the cache: {error}",
            stacklevel=1,
        )


@dataclass
class TrainingLoop:
    """Training loop without its state; reads the metrics of a step while the next one computes."""

    program: ResolvedProgram
    run: Run
    programs: LoadedPrograms
    frozen: tuple[Tree, ...]  # one tree of weights without gradients, or empty
    loader: Any
    placement: BatchPlacement
    checkpoints: Checkpoints
    open_journal: Callable[[], tuple[Report, JournalPosition]]
    notify: Notify  # of callbacks
    start: int
    data_check: DataCheck
    records: dict[str, Any]  # kept in every checkpoint: what the run is, and permitted changes
    stop: StopRequest
    watchdog: Watchdog
    history: ValidationHistory
    _write: Report = field(init=False)
    _journal_position: JournalPosition = field(init=False)
    # Last started step: its number, metrics, learning rate, and seconds waited for data.
    _pending: tuple[int, Tree, float, float] | None = None
    _saving: int | None = None  # step of the checkpoint that is being written
    _last_finished_at: float = field(default_factory=time.perf_counter)
    _flops: dict[str, float] = field(init=False)  # useful FLOPs per token, by metric name

    def __post_init__(self) -> None:
        program = self.program.settings
        if sizes_unknown(program):
            self._flops = self.programs["train"].record.get("flops_per_token", {})
        else:
            self._flops = useful_flops_per_token(with_native_model(program))

    def run_steps(self, state: Tree, *, evaluate_first: bool = False) -> RunSummary:
        """Run the steps from the first to run.steps, with evaluations and checkpoints.

        Args:
            state: state before the first step.
            evaluate_first: whether the evaluation before the first step was given up by the run
                that saved the checkpoint, and is repeated.
        """
        run, target, stop, watchdog = self.run, self.program.target, self.stop, self.watchdog
        step = self.programs["train"]
        validation, completed_steps, opened = None, self.start, False
        if stop.should_stop():  # while the run was loading; there is nothing new to save
            return self._summary(completed_steps, None)
        if evaluate_first:
            self._write, self._journal_position = self.open_journal()
            opened = True
            validation, _ = self._evaluate(self.start, state)
        for index in range(self.start, run.steps):
            if stop.signal is not None or self._has_stalled():  # in the first evaluation
                break
            rate = learning_rate(run.learning_rate, run.steps, index)
            watchdog.move(DATA, index + 1)
            batch, waited = self._next_batch()
            watchdog.move(COMPUTING, index + 1)
            outputs = step(state, *self.frozen, self.placement.to_devices(batch), np.float32(rate))
            state, completed_steps = outputs["state"], index + 1
            if not opened:
                self._write, self._journal_position = self.open_journal()  # while it computes
                opened = True
            self._finish_pending_step()
            self.checkpoints.raise_if_failed()
            if not self.checkpoints.is_writing():
                self._report_checkpoint()
            self.data_check.raise_if_damaged()
            if index == self.start + 1 and target.platform == "cpu":
                use_huge_pages()  # heap of the first step, which has completed
            self._pending = completed_steps, outputs["metrics"], rate, waited
            last = completed_steps == run.steps
            evaluated, is_best = None, False
            if is_evaluation_due(run, completed_steps):
                evaluated, is_best = self._evaluate(completed_steps, state)
                validation = evaluated
            stopping = stop.should_stop() or self._has_stalled()
            saving = last or completed_steps % run.save_every == 0 or stopping
            if saving or (is_best and run.keep_best):
                self._finish_pending_step()  # checks that the loss is finite before saving
                self.data_check.raise_if_damaged()
                watchdog.move(SAVING, completed_steps)
                self._save(completed_steps, state, evaluated)
            if stopping:
                break
        self._finish_pending_step()
        watchdog.move(SAVING, completed_steps)  # until the last checkpoint is complete
        self.checkpoints.wait()
        self._report_checkpoint()
        summary = self._summary(completed_steps, validation)
        self.notify("on_run_end", summary)
        return summary

    def _summary(self, completed_steps: int, validation: float | None) -> RunSummary:
        run, stop = self.run, self.stop
        is_complete = completed_steps == run.steps and (
            run.data.validation is None or validation is not None
        )
        stopped = stop.signal.name if stop.signal and not is_complete else None
        return RunSummary(
            Path(run.directory),
            completed_steps,
            self.start or None,
            validation,
            stopped,
            self.history.best_step,
            stopped is None and completed_steps < run.steps,
        )

    def _has_stalled(self) -> bool:
        return self.history.has_stalled(self.run.early_stopping_patience)

    def _save(self, completed_steps: int, state: Tree, validation_loss: float | None) -> None:
        self.checkpoints.save(  # waits until the previous one is complete
            completed_steps,
            lowering.backend(self.program.target).checkpoint_arrays(state),
            self.loader.state(),
            validation_loss=validation_loss,
            journal=self._journal_position(),
            **self.records,
        )
        self._report_checkpoint()
        self._saving = completed_steps

    def _report_checkpoint(self) -> None:
        """Notify the callbacks of the checkpoint that was being written and is now complete."""
        if self._saving is not None:
            path = Path(self.run.directory) / "checkpoints" / str(self._saving)
            self.notify("on_checkpoint", self._saving, path)
            self._saving = None

    def _next_batch(self) -> tuple[dict[str, np.ndarray], float]:
        """Return this process's rows of the next batch, and the seconds waited for them."""
        start_time = time.perf_counter()
        return next(self.loader), time.perf_counter() - start_time

    def _finish_pending_step(self) -> None:
        """Wait for the metrics of the last started step, check that they are finite, write them.

        Raises:
            TrainingError: the loss or the gradient norm is not finite.
        """
        if self._pending is None:
            return
        completed_steps, metrics, rate, waited = self._pending
        self._pending = None
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        extra_metrics = {
            name: float(metrics[name]) for name in metrics if name not in _COMMON_METRICS
        }
        now = time.perf_counter()
        seconds, self._last_finished_at = now - self._last_finished_at, now
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(self._not_finite(completed_steps, loss, norm))
        tokens_per_second = self.program.batch.tokens / seconds
        self._write(
            {
                "step": completed_steps,
                "loss": loss,
                "grad_norm": norm,
                **extra_metrics,
                "learning_rate": rate,
                "targets": int(metrics["targets"]),
                "step_seconds": round(seconds, 6),
                "data_wait_seconds": round(waited, 6),
                "tokens_per_second": round(tokens_per_second, 2),
                **self._utilization(tokens_per_second),
                "memory_bytes": lowering.backend(self.program.target).memory_in_use(),
            }
        )

    def _utilization(self, tokens_per_second: float) -> dict[str, float | None]:
        """Return the model FLOPs utilization (MFU); None if FLOPs or the peak are unknown."""
        peak, flops_per_token = (
            self.program.target.peak_flops(self.program.model.dtype),
            self._flops,
        )
        return {
            name: round(flops_per_token[name] * tokens_per_second / peak, 6)
            if peak and flops_per_token
            else None
            for name in ("mfu", "mfu_causal")
        }

    def _not_finite(self, completed_steps: int, loss: float, norm: float) -> str:
        self.checkpoints.wait()  # until the last checkpoint is complete
        directory = Path(self.run.directory)
        saved = saved_steps(directory / "checkpoints")
        good = [step for step in saved if step in good_steps(read_journal(directory))]
        text = (
            f"step {completed_steps}: loss {loss}, gradient norm {norm}; the batch contains "
            f"{self.loader.describe(completed_steps - 1)}; last good checkpoint: "
            + (f"{directory}/checkpoints/{good[-1]}" if good else "none")
        )
        if saved and saved[-1] not in good:
            text += (
                f"; {directory}/checkpoints/{saved[-1]} is newer, but no step from it was finite: "
                "move it away to resume from the one before it"
            )
        return text + (
            "; the same command meets the same batch again: lower run.learning_rate.peak or "
            "program.optimizer.clip_norm (and permit it with --allow-change NAME), or take these "
            "documents out of the data"
        )

    def _evaluate(self, completed_steps: int, state: Tree) -> tuple[float | None, bool]:
        """Return the validation loss, None if it was given up, and whether it is the lowest."""
        loss = self._validate(completed_steps, state)
        return loss, loss is not None and self.history.add(completed_steps, loss)

    def _validate(self, completed_steps: int, state: Tree) -> float | None:
        run = self.run
        if run.data.validation is None:
            return None
        from graphtrain.run.evaluate import validation_loss

        self._finish_pending_step()
        evaluate = self.programs["evaluate"]
        rows = BatchPlacement(evaluate.inputs("batch"), self.program.target).rows
        batches = on_all_ranks(lambda: _validation(run, self.program.settings, rows))
        weights = state["parameters"], *self.frozen
        target = self.program.target

        def should_stop(batch: int) -> bool:
            self.watchdog.move(EVALUATING, completed_steps, batch)
            self.checkpoints.raise_if_failed()
            return self.stop.should_stop()

        loss = validation_loss(evaluate, weights, batches, target, should_stop=should_stop)
        if loss is None:
            return None
        self._write({"step": completed_steps, "validation_loss": loss})
        self._last_finished_at = time.perf_counter()  # do not count the evaluation as step time
        return loss
