"""Steps of a dump: run by compiled programs or by PyTorch, and written on rank 0."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.config.phases import TrainingPhase
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.graphs.names import DUMP
from graphtrain.run.agreement import on_all_ranks, on_rank_zero
from graphtrain.run.batch_placement import BatchPlacement
from graphtrain.run.dumps.eager import eager_index, eager_step
from graphtrain.run.dumps.files import StepEntry, not_finite_reason, write_index, write_step
from graphtrain.run.dumps.gather import gather
from graphtrain.run.dumps.host_arrays import host_arrays
from graphtrain.run.dumps.index import changed_shapes, make_index
from graphtrain.run.learning_rate import learning_rate
from graphtrain.run.phases import PhasePrograms, PhaseSequence, index_of_phase
from graphtrain.run.spikes import Limits
from graphtrain.run.training_data import training_loader
from lowering.trees import Tree
from lowering.xla import distributed


@dataclass(frozen=True)
class StartingState:
    """State from which a dump starts."""

    step: int  # completed steps
    state: Tree
    data_position: dict[str, Any] | None  # None: the beginning


@dataclass(frozen=True)
class _DumpedStep:
    """Arrays of one step, whole."""

    arrays: Mapping[str, np.ndarray]
    batch: str  # digest
    record: Mapping[str, Any]  # of the program
    facts: Mapping[str, Any]  # of the loss scale


class StepDumper:
    """The steps of a dump, one after another, and their files."""

    def __init__(
        self,
        program: ResolvedProgram,
        run: Run,
        frozen: tuple[Tree, ...],
        directory: Path,
        *,
        eager: bool,
    ) -> None:
        """Prepare to write.

        Args:
            program: program of the run.
            run: settings of the run.
            frozen: frozen weights, if there are any.
            directory: directory to write to, on a file system that all processes see.
            eager: whether PyTorch computes the step.
        """
        self._program, self._run, self._frozen = program, run, frozen
        self._directory, self._eager = directory, eager
        self._first: _DumpedStep | None = None  # on rank 0, as are the entries
        self._entries: list[StepEntry] = []

    def write_steps(
        self, programs: Sequence[PhasePrograms], begin: StartingState, steps: int
    ) -> None:
        """Run `steps` steps and write the dump; all ranks call it.

        Raises:
            DumpError: the steps are of phases with different arrays, or files cannot be written.
            DataError: the training data cannot be used.
        """
        current = index_of_phase([one.phase for one in programs], begin.step)
        phases = PhaseSequence(programs, current, partial(_open_data, self._run), DUMP)
        try:
            phases.open()
            if begin.data_position is not None:
                phases.loader.restore(begin.data_position)
            state = begin.state
            for number in range(begin.step, begin.step + steps):
                if phases.is_over(number):
                    phases.advance()
                state, step = self._run_step(phases, state, number)
                on_rank_zero(partial(self._write, number + 1, step), lambda: None)
        finally:
            phases.close()
        on_rank_zero(partial(self._write_index, phases.current), lambda: None)

    def _run_step(
        self, phases: PhaseSequence, state: Tree, number: int
    ) -> tuple[Tree, _DumpedStep | None]:
        """Run the step after `number` steps; return the new state, and on rank 0 its arrays."""
        program, step = phases.current.phase.program, phases.current.programs[DUMP]
        backend = lowering.backend(program.target)
        batch = on_all_ranks(lambda: next(phases.loader))
        if self._eager:
            parameters = backend.checkpoint_arrays({"parameters": state["parameters"]})
            arrays = eager_step(program, parameters["parameters"], batch)
            return state, _DumpedStep(arrays, _digest(batch), step.record, {})
        rate = np.float32(learning_rate(self._run.learning_rate, self._run.steps, number))
        limits = (Limits().arrays(),) if program.optimizer.skip_spikes else ()
        placed = phases.placement.to_devices(batch)
        outputs = step(state, *self._frozen, placed, rate, *limits)
        results = {name: outputs[name] for name in ("arrays", "metrics")}
        if distributed.count() > 1:
            results["batch"] = placed  # of which this process has read a part
        whole = gather(backend.checkpoint_arrays(results), self._directory)
        if whole is None:
            return outputs["state"], None
        arrays = host_arrays(program, step.record, whole)
        digest, facts = _digest(whole.get("batch", batch)), scale_facts(whole["metrics"])
        return outputs["state"], _DumpedStep(arrays, digest, step.record, facts)

    def _write(self, number: int, step: _DumpedStep | None) -> None:
        """Write the files of a step."""
        assert step is not None, "on rank 0"
        self._first = self._first or step
        entry = write_step(
            self._directory,
            number,
            step.arrays,
            batch=step.batch,
            summary=step.record[DUMP]["summary"] and not self._eager,
            shapes=changed_shapes(self._first.record, step.record, number),
            **step.facts,
        )
        self._entries.append(entry)
        warn_unless_finite(entry, len(step.arrays))

    def _write_index(self, last: PhasePrograms) -> None:
        assert self._first is not None
        arrays, digest = self._first.arrays, last.programs.keys[DUMP].digest
        index = make_index(
            self._program, self._run, self._first.record, arrays, digest, self._entries
        )
        write_index(self._directory, eager_index(index, arrays) if self._eager else index)


def _open_data(run: Run, phase: TrainingPhase, placement: BatchPlacement) -> Any:
    return on_all_ranks(lambda: training_loader(run, phase.program.settings, placement.rows))


def scale_facts(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the dynamic loss scale of a step; none if it has no such scale."""
    if "loss_scale" not in metrics:
        return {}
    skipped = not math.isfinite(float(metrics["grad_norm"]))
    return {"loss_scale": float(metrics["loss_scale"]), "skipped": skipped}


def warn_unless_finite(entry: StepEntry, arrays: int) -> None:
    """Warn of a step in which some of the arrays compare with nothing."""
    if (reason := not_finite_reason(entry, arrays)) is None:
        return
    remedy = "graphtrain compare does not compare what is not finite"
    if entry["skipped"]:
        remedy = (
            "start from a checkpoint (--step), or with a smaller program.precision.initial_scale"
        )
    warnings.warn(f"step {entry['step']} {reason}; {remedy}", stacklevel=2)


def _digest(batch: Mapping[str, np.ndarray]) -> str:
    """Return a digest of a global batch."""
    hashed = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name].reshape(-1, batch[name].shape[-1]))
        hashed.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return hashed.hexdigest()[:16]
