"""Dump of a run's next steps, by a training step that was compiled to return arrays."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.checkpoints.info import check_same_model, read_checkpoint_info
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.checkpoints.pruned import read_checkpoint
from graphtrain.checkpoints.steps import Retention, missing_checkpoint, saved_steps
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Config, Run
from graphtrain.errors import DumpError
from graphtrain.graphs.names import DUMP, KINDS, SUMMARY
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.run.batch_placement import BatchPlacement
from graphtrain.run.dumps.eager import check_eager, eager_index, eager_step
from graphtrain.run.dumps.files import (
    ArrayEntry,
    DumpIndex,
    StepEntry,
    StoredDump,
    not_finite_reason,
    write_index,
    write_step,
)
from graphtrain.run.initial_weights import InitialWeights, load_initial_weights
from graphtrain.run.learning_rate import learning_rate
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.resume import identity_of
from graphtrain.run.spikes import Limits
from graphtrain.run.training_data import training_loader
from lowering.machine.toolchain import Toolchain
from lowering.trees import Tree, flatten
from lowering.xla import distributed

METRICS = ("loss", "grad_norm")  # of each step, beside its arrays


@dataclass(frozen=True)
class StartingState:
    """State from which a dump starts."""

    step: int  # completed steps
    state: Tree
    data_position: dict[str, Any] | None  # None: the beginning


def take_dump(
    program: ResolvedProgram,
    run: Run,
    cache: Cache,
    directory: Path,
    *,
    steps: int,
    start: int | None,
    compile_hint: str,
    eager: bool = False,
) -> StoredDump:
    """Run training steps and write the arrays of program.dump of each; the run is not changed.

    Args:
        program: the program.
        run: settings of the run.
        cache: cache with the compiled programs.
        directory: directory to create.
        steps: number of steps.
        start: step of the checkpoint to start from; 0 for the initial state, None for the last
            checkpoint or, if there is none, the initial state.
        compile_hint: command that compiles the missing programs, for the error message.
        eager: whether eager PyTorch computes the step of an imported model, with the same weights
            and batch.

    Raises:
        MissingProgram: a program is not in the cache.
        DumpError: the run has several processes or phases, or PyTorch does not repeat its step.
        TrainingError: there is no such checkpoint, or it is of another model.
        DataError: the training data cannot be used.
        WeightsError: the directory exists, or the initial weights cannot be used.
    """
    if distributed.count() > 1:
        raise DumpError("graphtrain dump runs in one process; use a target of one host")
    if program.phases:
        raise DumpError(
            "graphtrain dump has no phases; give the settings of one with --set, and "
            "--set program.phase=[]"
        )
    if eager:
        check_eager(program, steps)
    checkpoints = Path(run.directory) / "checkpoints"
    saved = saved_steps(checkpoints)
    if start and start not in saved:
        raise missing_checkpoint(checkpoints, saved)
    resumes = bool(saved) if start is None else start > 0
    initial_weights = InitialWeights.open(program, run, resuming=resumes)
    names = [DUMP] if resumes else ["init", DUMP]
    programs = LoadedPrograms(program, cache, names, compile_hint)
    backend = lowering.backend(program.target)
    with ExitStack() as stack:
        unfinished = stack.enter_context(create_directory(directory))
        step = programs[DUMP]
        with backend.forbid_tracing():
            if resumes:
                begin = _restored(program, checkpoints, start, step.inputs("state"))
            else:
                begin = _new(programs, run, initial_weights)
            frozen = ()
            if initial_weights is not None and has_frozen_weights(program.settings):
                frozen = (initial_weights.frozen(step.inputs("frozen")),)
            placement = BatchPlacement(step.inputs("batch"), program.target)
            loader = training_loader(run, program.settings, placement.rows)
            stack.callback(loader.close)
            if begin.data_position is not None:
                loader.restore(begin.data_position)
        state, entries, arrays = begin.state, [], {}
        summary = step.record[DUMP]["summary"] and not eager
        for number in range(begin.step, begin.step + steps):
            batch, facts = next(loader), {}
            if eager:
                parameters = backend.checkpoint_arrays({"parameters": state["parameters"]})
                arrays = eager_step(program, parameters["parameters"], batch)
            else:
                rate = np.float32(learning_rate(run.learning_rate, run.steps, number))
                limits = (Limits().arrays(),) if program.optimizer.skip_spikes else ()
                with backend.forbid_tracing():
                    outputs = step(state, *frozen, placement.to_devices(batch), rate, *limits)
                state = outputs["state"]
                results = {name: outputs[name] for name in ("arrays", "metrics")}
                results = backend.checkpoint_arrays(results)
                arrays = host_arrays(program, step.record, results)
                facts = scale_facts(results["metrics"])
            entries.append(
                write_step(
                    unfinished,
                    number + 1,
                    arrays,
                    batch=_digest(batch),
                    summary=summary,
                    **facts,
                )
            )
            warn_unless_finite(entries[-1], len(arrays))
        index = _index(program, run, step.record, programs, arrays, entries)
        write_index(unfinished, eager_index(index, arrays) if eager else index)
    return StoredDump.open(directory)


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


def _restored(
    program: ResolvedProgram, directory: Path, step: int | None, described: Tree
) -> StartingState:
    """Return the state of a checkpoint; None for the last."""

    def read(step: int | None) -> StartingState:
        assert step is not None
        info = read_checkpoint_info(directory, step)
        check_same_model(directory / str(step), info, program.settings)
        checkpoints = Checkpoints(directory, Retention(1), layer_order_of(program))
        try:
            restored = checkpoints.restore(step, described)
        finally:
            checkpoints.close()
        return StartingState(step, restored.state, restored.data_position)

    return read_checkpoint(directory, step, read)[1]


def _new(
    programs: LoadedPrograms, run: Run, initial_weights: InitialWeights | None
) -> StartingState:
    """Return the state of a run before its first step."""
    state = programs["init"](np.uint32(run.seed))["state"]
    if initial_weights is not None:
        described = programs[DUMP].inputs("state")
        state = load_initial_weights(initial_weights, described, state)
    return StartingState(0, state, None)


def host_arrays(
    program: ResolvedProgram, record: Mapping[str, Any], outputs: Tree
) -> dict[str, np.ndarray]:
    """Return the arrays of one step by name: whole, of all microbatches, positions in order."""
    stacks = {path: np.asarray(array) for path, array in flatten(outputs["arrays"]).items()}
    arrays = {}
    for fact in record[DUMP]["arrays"]:
        stack, row = stacks[fact["output"]], fact["row"]
        is_of_microbatches = program.batch.microbatches > 1 and not _is_parameter(fact)
        # Dimensions: microbatches, if there are several; layers, if the array stacks them.
        chosen = stack if is_of_microbatches else stack[None]
        chosen = chosen if row is None else chosen[:, row]
        if record[DUMP]["summary"]:
            arrays[fact["name"]] = merge_summaries(chosen)
        else:
            arrays[fact["name"]] = _merged(program, chosen, fact["axes"])
    metrics = {name: np.float32(outputs["metrics"][name]).reshape(()) for name in METRICS}
    return arrays | {f"metrics/{name}": np.asarray(value) for name, value in metrics.items()}


def _is_parameter(fact: Mapping[str, Any]) -> bool:
    return fact["name"].startswith(f"{KINDS[-1]}/")


def _merged(program: ResolvedProgram, array: np.ndarray, axes: list[str | None]) -> np.ndarray:
    """Return an array without its dimension of microbatches, its positions in sequence order."""
    if axes and axes[0] == "batch":
        array = array.reshape(-1, *array.shape[2:])
    elif len(array) == 1:
        array = array[0]
    ring = program.mesh.size(program.rules.activations.get("kv_seq", ()))
    for dimension, axis in enumerate(axes):
        if axis in ("seq", "residual") and ring > 1:
            array = _in_sequence_order(array, dimension, ring)
    return np.ascontiguousarray(array)


def _in_sequence_order(array: np.ndarray, dimension: int, ring: int) -> np.ndarray:
    """Undo the order of ring attention: device i of n holds chunks i and 2n - 1 - i."""
    chunks = [chunk for device in range(ring) for chunk in (device, 2 * ring - 1 - device)]
    pieces = np.split(array, 2 * ring, axis=dimension)
    return np.concatenate([pieces[chunks.index(chunk)] for chunk in range(2 * ring)], dimension)


def merge_summaries(rows: np.ndarray) -> np.ndarray:
    """Return the summary of several arrays of the same size, as one of all their elements.

    Args:
        rows: a row of statistics, `names.SUMMARY`, for each.
    """
    columns = dict(zip(SUMMARY, rows.astype(np.float64).T, strict=True))
    merged = (
        np.sqrt(np.square(columns["norm"]).sum()),
        columns["max_abs"].max(),
        columns["mean"].mean(),
        columns["zeros"].mean(),
        columns["non_finite"].sum(),
    )
    return np.array(merged, np.float32)


def _index(
    program: ResolvedProgram,
    run: Run,
    record: Mapping[str, Any],
    programs: LoadedPrograms,
    arrays: Mapping[str, np.ndarray],
    steps: list[StepEntry],
) -> DumpIndex:
    facts = {fact["name"]: fact for fact in record[DUMP]["arrays"]}
    entries = []
    for name, array in arrays.items():
        fact = facts.get(name)
        dtype = array.dtype.name if fact is None else fact["dtype"]
        shape = list(array.shape) if fact is None else fact["shape"]
        entries.append(ArrayEntry(name, shape, dtype, fact["lines"] if fact else []))
    toolchain = Toolchain.current(program.target.platform)
    return DumpIndex(
        target=str(program.target),
        mesh={axis: size for axis, size in program.mesh.axes.items() if size > 1},
        dtype=program.model.dtype,
        summary=record[DUMP]["summary"],
        program=programs.keys[DUMP].digest,
        identity=identity_of(Config(program=program.settings, run=run)),
        versions=dict(toolchain.versions),
        arrays=entries,
        steps=steps,
    )


def _digest(batch: Mapping[str, np.ndarray]) -> str:
    """Return a digest of a global batch."""
    hashed = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name].reshape(-1, batch[name].shape[-1]))
        hashed.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return hashed.hexdigest()[:16]
