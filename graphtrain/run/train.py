"""The training loop over loaded programs."""

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import Checkpoints, arrangement_of, saved_steps
from graphtrain.config import render
from graphtrain.config.schema import Config, Program, Run
from graphtrain.cost_model.native_equivalent import sizes_unknown, with_native_model
from graphtrain.errors import TrainingError
from graphtrain.models.flops import useful_flops_per_token
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.run.agreement import check_programs, check_steps, together
from graphtrain.run.directory_lock import owned
from graphtrain.run.initial_weights import Beginning
from graphtrain.run.learning_rate import learning_rate
from graphtrain.run.metrics import Journal, Record, read_journal, writing
from graphtrain.run.programs import Programs
from graphtrain.run.signals import StopRequest, stop_requests
from lowering.machine import distributed, host
from lowering.machine.memory_pages import PagesAhead, merge_pages
from lowering.machine.target import Target
from lowering.trees import Tree
from sharding_rules.errors import ShardingError

Report = Callable[[Record], None]
_USUAL = ("loss", "grad_norm", "targets")  # metrics of every step


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    steps: int  # taken in all
    resumed_from: int | None
    validation_loss: float | None
    stopped_by: str | None  # the signal, if one did


def train(config: Config, cache: Cache, *, remedy: str, report: Report) -> Summary:
    """Train from compiled programs to run.steps, from the last checkpoint if there is one.

    Args:
        remedy: the command that compiles what is missing, for messages.
        report: called with every record that goes into the journal.

    Raises:
        MissingProgram: a graph is not in the cache.
        TrainingError: the loss is not finite, or the run's directory cannot be used.
        DataError: the dataset cannot be used.
    """
    run, program = config.run, config.program
    directory = Path(run.directory)
    first = distributed.rank() == 0  # writes what all share
    with ExitStack() as stack:
        together(lambda: stack.enter_context(owned(directory)) if first else None)
        saved = saved_steps(directory / "checkpoints")
        check_steps(run.directory, saved)
        start = saved[-1] if saved else 0
        beginning = together(lambda: Beginning.open(config, resumes=bool(saved)))
        names = ["train", "evaluate"] if saved else ["init", "train", "evaluate"]
        programs = together(lambda: Programs(program, cache, names, remedy))
        check_programs(programs)
        ahead = _pages_ahead(programs, Target.parse(program.target))
        stack.callback(ahead.stop)
        if distributed.count() > 1:  # what cannot be loaded on one ends all, before any computes
            together(lambda: [programs[name] for name in names])
        stop = stack.enter_context(stop_requests())
        stack.enter_context(lowering.backend(Target.parse(program.target)).forbid_tracing())
        given = ahead.stop()
        began = host.forget_peak() - given
        checkpoints = Checkpoints(
            directory / "checkpoints", run.keep_checkpoints, arrangement_of(program)
        )
        stack.callback(checkpoints.close)
        restored = None
        if saved:
            restored = checkpoints.restore(start, programs["train"].inputs("state"))
            state = restored.state
            loader = _open_data(run, program, stack)
        else:
            # XLA loads programs and computes init by itself; data takes imports, which need Python.
            # Programs are loaded here: processes that compute for this one end with its thread.
            with ThreadPoolExecutor(1) as aside:
                opened = aside.submit(_open_data, run, program, stack)
                state = _new_state(programs, run.seed)
            loader = opened.result()
            if beginning is not None:
                state = _start_from(beginning, programs, state)
        step = programs["train"]
        frozen = ()
        if beginning is not None and has_frozen_weights(program):
            frozen = (beginning.frozen(step.inputs("frozen")),)
        if restored is not None:
            loader.restore(restored.loader)
        if first:
            stack.callback(_add_to_ledger, config, cache, programs, start, began)
        kept = None if saved else beginning
        opens = partial(_open_journal, config, kept, start, report, stack) if first else _no_journal
        loop = _Loop(config, programs, frozen, loader, checkpoints, opens, start)
        gc.freeze()  # what was imported stays; the command puts collections off until here
        gc.enable()
        return loop.take_steps(state, stop)


def _pages_ahead(programs: Programs, target: Target) -> PagesAhead:
    """Where a CPU trains, get its memory while JAX is imported."""
    here = target.devices // (target.processes or 1) if target.platform == "cpu" else 0
    return PagesAhead(programs.peak_bytes() * here)


def _new_state(programs: Programs, seed: int) -> Tree:
    """A state of random weights, on its way; what takes the first step is loaded, too."""
    state = programs["init"](np.uint32(seed))["state"]
    programs["train"]
    return state


def _start_from(beginning: Beginning, programs: Programs, state: Tree) -> Tree:
    """A new state with weights in place of the random ones, which are given up first."""
    others = {name: tree for name, tree in state.items() if name != "parameters"}
    # Of an adapter, a part of what init made stays.
    new = state["parameters"] if beginning.program.adapter is not None else None
    state.clear()
    described = programs["train"].inputs("state")["parameters"]
    return others | {"parameters": beginning.parameters(described, new)}


def _keep_side(config: Config, beginning: Beginning | None) -> None:
    """What is beside the weights, and the tokenizer of the data, for the way back."""
    from graphtrain.weights.sources import SIDE
    from graphtrain.weights.tokenizer import keep_tokenizer

    run = config.run
    directory = Path(run.directory)
    if beginning is not None:
        beginning.keep(directory)
    data = run.data.train if isinstance(run.data.train, str) else run.data.train[0].dataset
    with writing(directory):
        keep_tokenizer(data, directory / SIDE)


def _open_journal(
    config: Config, beginning: Beginning | None, start: int, report: Report, stack: ExitStack
) -> Report:
    """Begin to write into the run's directory; only when the run is known to go on."""
    directory = Path(config.run.directory)
    with writing(directory):
        (directory / "config.toml").write_text(render(config))
    _keep_side(config, beginning)
    journal = Journal(directory, after=start, tensorboard=config.run.tensorboard)
    stack.callback(journal.close)

    def write(record: Record) -> None:
        journal.write(record)
        report(record)

    return write


def _no_journal() -> Report:
    """Every process has the same metrics; the first writes them."""
    return lambda record: None


def _open_data(run: Run, program: Program, stack: ExitStack) -> Any:
    """The loader, which the stack closes, once the validation set shows that it can be used too."""

    def opened() -> Any:
        from graphtrain.data.batches.loader import Loader

        if run.data.validation is not None:
            from graphtrain.run.evaluate import check_validation

            check_validation(_validation(run, program), program)
        return Loader(
            run.data.train,
            global_batch_size=program.batch.sequences,
            seq_len=program.batch.length,
            seed=run.seed,
            vocab=program.model.vocab,
            isolate_documents=program.batch.documents == "apart",
            packing=run.data.packing,
            overlong=run.data.longer,
            pairs=program.loss.kind == "preference",
        )

    loader = together(opened)
    stack.callback(loader.close)
    return loader


def _validation(run: Run, program: Program) -> Iterable[dict[str, np.ndarray]]:
    from graphtrain.run.evaluate import validation_batches

    return validation_batches(run.data, program, program.model.vocab, run.evaluate_batches)


def _add_to_ledger(
    config: Config, cache: Cache, programs: Programs, start: int, began: int
) -> None:
    """Keep what the run took, however it ended; a ledger that cannot be written ends no run."""
    from graphtrain.planning.measured import add_run

    steps = [one for one in read_journal(Path(config.run.directory)) if one["step"] > start]
    if not steps or sizes_unknown(config.program):
        return
    target = Target.parse(config.program.target)
    peak = lowering.backend(target).peak_memory()
    # Devices of a CPU share the process, which held something before it trained.
    each = (peak - began) / target.devices if target.on_host else peak
    try:
        add_run(cache.root, config.program, programs["train"].record, steps, each)
    except (OSError, ShardingError) as error:
        warnings.warn(f"the run is not in the ledger: {error}", stacklevel=1)


@dataclass
class _Loop:
    """What the loop holds beside the state; metrics are read while the next step computes."""

    config: Config
    programs: Programs
    frozen: tuple[Tree, ...]  # weights that no step changes, if there are any
    loader: Any
    checkpoints: Checkpoints
    open_journal: Callable[[], Report]
    start: int
    _write: Report = field(init=False)
    _pending: tuple[int, Tree, float, float] | None = None  # step, metrics, rate, waited
    _settled_at: float = field(default_factory=time.perf_counter)
    _target: Target = field(init=False)
    _flops: dict[str, float] = field(init=False)  # useful ones of a token, by metric

    def __post_init__(self) -> None:
        program = self.config.program
        self._target = Target.parse(program.target)
        if sizes_unknown(program):
            self._flops = self.programs["train"].record.get("flops_per_token", {})
        else:
            self._flops = useful_flops_per_token(with_native_model(program))

    def take_steps(self, state: Tree, stop: StopRequest) -> Summary:
        run = self.config.run
        put = lowering.backend(self._target).put
        step, batches = self.programs["train"], self.programs["train"].inputs("batch")
        validation, done = None, self.start
        for index in range(self.start, run.steps):
            rate = learning_rate(run.schedule, run.steps, index)
            batch, waited = self._next_batch()
            outputs = step(state, *self.frozen, put(batch, batches), np.float32(rate))
            state, done = outputs["state"], index + 1
            if index == self.start:
                self._write = self.open_journal()  # while the step computes
            self._settle()
            if index == self.start + 1 and self._target.platform == "cpu":
                merge_pages()  # of the first step, which is finished
            self._pending = done, outputs["metrics"], rate, waited
            last = done == run.steps
            if last or (run.evaluate_every and done % run.evaluate_every == 0):
                validation = self._validate(done, state)
            stopping = stop.is_due(done)
            if last or done % run.save_every == 0 or stopping:
                self._settle()  # never save a state whose loss is not known to be finite
                storable = lowering.backend(self._target).storable(state)
                self.checkpoints.save(done, storable, self.loader.state())
            if stopping:
                break
        self._settle()
        stopped = stop.signal.name if stop.signal and done < run.steps else None
        return Summary(done, self.start or None, validation, stopped)

    def _next_batch(self) -> tuple[Tree, float]:
        """The batch of a step in microbatches, and how long the loop waited for it."""
        began = time.perf_counter()
        batch, count = next(self.loader), self.config.program.batch.microbatches
        waited = time.perf_counter() - began
        return {
            name: array.reshape(count, -1, array.shape[-1]) for name, array in batch.items()
        }, waited

    def _settle(self) -> None:
        """Wait for the metrics of the last step given out, check them and write them down."""
        if self._pending is None:
            return
        done, metrics, rate, waited = self._pending
        self._pending = None
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        further = {name: float(metrics[name]) for name in metrics if name not in _USUAL}
        now = time.perf_counter()
        seconds, self._settled_at = now - self._settled_at, now
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(self._not_finite(done, loss, norm))
        tokens_per_second = self.config.program.batch.tokens / seconds
        self._write(
            {
                "step": done,
                "loss": loss,
                "grad_norm": norm,
                **further,
                "learning_rate": rate,
                "targets": int(metrics["targets"]),
                "step_seconds": round(seconds, 6),
                "data_wait_seconds": round(waited, 6),
                "tokens_per_second": round(tokens_per_second, 2),
                **self._utilization(tokens_per_second),
                "memory_bytes": lowering.backend(self._target).memory_in_use(),
            }
        )

    def _utilization(self, tokens_per_second: float) -> dict[str, float | None]:
        """Model FLOP utilisation; None where the model's operations or the peak are not known."""
        peak, known = self._target.peak_flops(self.config.program.model.dtype), self._flops
        return {
            name: round(known[name] * tokens_per_second / peak, 6) if peak and known else None
            for name in ("mfu", "mfu_causal")
        }

    def _not_finite(self, done: int, loss: float, norm: float) -> str:
        self.checkpoints.wait()  # so that the last one counts
        saved = saved_steps(Path(self.config.run.directory) / "checkpoints")
        return (
            f"step {done}: loss {loss}, gradient norm {norm}; the batch holds "
            f"{self.loader.describe(done - 1)}; last good checkpoint: "
            + (f"{self.config.run.directory}/checkpoints/{saved[-1]}" if saved else "none")
        )

    def _validate(self, done: int, state: Tree) -> float | None:
        run, program = self.config.run, self.config.program
        if run.data.validation is None:
            return None
        from graphtrain.run.evaluate import validation_loss

        self._settle()
        batches = _validation(run, program)
        evaluate = self.programs["evaluate"]
        weights = state["parameters"], *self.frozen
        loss = validation_loss(evaluate, weights, batches, self._target)
        self._write({"step": done, "validation_loss": loss})
        self._settled_at = time.perf_counter()  # the next step did not take this time
        return loss
