"""Checkpoints: save and restore a run's state with Orbax, also into another mesh or pipeline.

Orbax is imported when the first checkpoint is saved or restored, not at the start of a run.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
from typing_extensions import TypedDict

import lowering
from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.layer_rows import Index, LayerRows, StackedArray, read_reordered_part
from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files, write_manifest
from graphtrain.config.identity import differences, is_of_model, model_mathematics, say
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Program
from graphtrain.errors import TrainingError
from graphtrain.files import validate
from graphtrain.graphs.open_model import open_language_model
from lowering.trees import Tree, flatten
from lowering.xla import distributed

StepName = int | Literal["last", "best"] | None  # None is the last
_POLL_SECONDS = 0.1  # between looks for an error in the background


@dataclass(frozen=True)
class RestoredState:
    """Restored contents of a checkpoint."""

    step: int  # number of completed steps
    state: Tree
    data_position: dict[str, Any]  # position of the data loader


@dataclass(frozen=True)
class LayerOrder:
    """Order of layer rows in a program's stacked arrays, and its backend's array loader."""

    rows: LayerRows | None  # layer in each row; None for an imported model without a pipeline
    load_arrays: Callable[[Tree, Callable[[str, tuple[int, ...], Any], np.ndarray]], Tree]
    by_shape: bool = False  # recognize stacked arrays by their shape, not by their path

    def reordering_from(self, kept: LayerRows | None) -> tuple[LayerRows, LayerRows] | None:
        """Return the rows of the checkpoint and of this program, or None if they are equal."""
        program_rows = self.rows
        if self.by_shape:
            program_rows, kept = (
                program_rows or _without_pipeline(kept),
                kept or _without_pipeline(program_rows),
            )
        return (
            None
            if program_rows is None or kept is None or program_rows == kept
            else (kept, program_rows)
        )


def _without_pipeline(rows: LayerRows | None) -> LayerRows | None:
    """Return the rows of the same layers without a pipeline."""
    return rows and tuple(range(sum(layer is not None for layer in rows)))


def layer_order_of(program: ResolvedProgram) -> LayerOrder:
    """Return the order in which a program stacks its layers."""
    target, stages = program.target, program.stages
    model, rows = open_language_model(program.model), None
    if stages is not None:
        rows = stages.rows
    elif model.layer_count is not None:
        rows = tuple(range(model.layer_count))
    return LayerOrder(
        rows,
        lambda described, read: lowering.backend(target).from_shards(described, read),
        by_shape=model.uses_module_names,
    )


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a directory, oldest first."""
    return private_orbax.complete_steps(directory)


def named_step(directory: Path, step: StepName) -> int | None:
    """Return the step of a checkpoint that a name stands for; None for the last.

    Raises:
        TrainingError: the best is asked for, and no checkpoint has a validation loss.
    """
    if step == "best":
        return best_step(directory)
    return None if step == "last" else step


def best_step(directory: Path) -> int:
    """Return the step of the checkpoint with the lowest validation loss; the newest of several.

    Raises:
        TrainingError: no checkpoint was saved with a validation loss.
    """
    losses = _saved_validation_losses(directory)
    if not losses:
        raise TrainingError(
            f"no checkpoint in {directory} was saved with a validation loss; set "
            "run.data.validation and run.evaluate_every (run.keep_best saves after every "
            "evaluation with a lower loss)"
        )
    return _lowest(losses)


def _lowest(losses: Mapping[int, float]) -> int:
    return min(losses, key=lambda step: (losses[step], -step))


def _saved_validation_losses(directory: Path, *, skip_damaged: bool = False) -> dict[int, float]:
    """Return the validation loss by step, of the checkpoints that were saved with one."""
    losses = {}
    for step in saved_steps(directory):
        try:
            loss = read_checkpoint_info(directory, step).validation_loss
        except TrainingError:
            if not skip_damaged:
                raise
            continue
        if loss is not None:
            losses[step] = loss
    return losses


def check_directory(directory: Path) -> None:
    """Check that checkpoints in a directory could be read again.

    Raises:
        TrainingError: the path contains a character that Orbax takes for a pattern.
    """
    path = str(directory.absolute())
    if found := [one for one in private_orbax.PATTERN_CHARACTERS if one in path]:
        raise TrainingError(
            f"{path}: checkpoints cannot be written to a path with {found[0]}, which Orbax takes "
            "for a pattern; choose another run.directory, or rename the directory"
        )


class Checkpoints:
    """Checkpoints of one run, saved in the background."""

    def __init__(
        self,
        directory: Path,
        max_to_keep: int,
        arrangement: LayerOrder | None = None,
        *,
        keep_best: bool = False,
    ) -> None:
        """Open the checkpoints in a directory, which the first save creates.

        Args:
            directory: The directory of the checkpoints, with one subdirectory for each step.
            max_to_keep: Number of checkpoints to retain; older ones are deleted.
            arrangement: Order of the layer rows. Without it, checkpoints with another order cannot
                be restored.
            keep_best: Whether to retain the checkpoint with the lowest validation loss too.
        """
        self._keep_best = keep_best
        self._named = directory  # as in messages
        self._directory = directory.absolute()  # Orbax requires an absolute path
        self._keep = max_to_keep
        self._arrangement = arrangement
        self._opened: Any = None
        self._validation_losses: dict[int, float] = {}
        self._errors: list[Exception] = []  # of saves in the background

    def save(
        self,
        step: int,
        state: Tree,
        loader: Mapping[str, Any],
        *,
        validation_loss: float | None = None,
        **records: Any,
    ) -> None:
        """Start saving; return when the arrays are copied, before they are written to disk.

        A background thread writes the files, their manifest, and renames the directory: a
        checkpoint is complete with its manifest, or not at all.

        Args:
            step: Number of completed steps.
            state: Arrays on the devices.
            loader: Position of the data loader.
            validation_loss: Validation loss of this state, if it was evaluated.
            records: More JSON values to keep, by the name of their field in `CheckpointInfo`.

        Raises:
            TrainingError: this or an earlier checkpoint could not be written.
        """
        import orbax.checkpoint as ocp

        metadata: dict[str, Any] = {
            "step": step,
            "loader": dict(loader),
            "arrays": _arrays(state),
            **records,
        }
        if validation_loss is not None:
            metadata["validation_loss"] = validation_loss
        if self._arrangement is not None and self._arrangement.rows is not None:
            metadata["rows"] = self._arrangement.rows
        self.wait()
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(metadata)
        )
        with self._save_errors():
            manager = self._manager()
            if validation_loss is not None:
                self._validation_losses[step] = validation_loss
            manager.save(step, args=items)

    def restore(self, step: int, described: Tree) -> RestoredState:
        """Load a checkpoint, or part of it, with the shapes, dtypes and shardings described.

        Layers that the checkpoint stacks in another order are reordered for this program. All
        files are verified against the manifest, beside reading them.

        Args:
            step: Step of the checkpoint.
            described: Tree of arrays to restore, with their shapes, dtypes and shardings.

        Raises:
            DamagedCheckpoint: a file is not as it was written.
            TrainingError: the checkpoint contains other arrays, or cannot be read.
        """
        with _verified(self._named / str(step)):
            return self._restore_unverified(step, described)

    def _restore_unverified(self, step: int, described: Tree) -> RestoredState:
        import orbax.checkpoint as ocp

        checkpoint_path = self._directory / str(step)
        info = read_checkpoint_info(self._directory, step)
        if self._arrangement is not None and (rows := self._arrangement.reordering_from(info.rows)):
            with checkpoint_errors(
                checkpoint_path, "read; move it away to resume from an earlier checkpoint"
            ):
                state = _load_reordered(checkpoint_path, info, described, self._arrangement, *rows)
            return RestoredState(step, state, info.data_position)
        _compare(checkpoint_path, info.arrays, _arrays(described))
        restore_args = ocp.args.PyTreeRestore(
            item=described,
            restore_args=ocp.checkpoint_utils.construct_restore_args(described),
            partial_restore=True,
        )
        with checkpoint_errors(
            checkpoint_path, "read; move it away to resume from an earlier checkpoint"
        ):
            state = self._restore(step, state=restore_args)["state"]
        return RestoredState(step, state, info.data_position)

    def quarantine(self, damaged: DamagedCheckpoint) -> Path:
        """Move a damaged checkpoint to the folder `quarantine` of the run; return its new path.

        Called on every rank; rank 0 moves it.

        Raises:
            TrainingError: it cannot be moved.
        """
        source = self._directory / damaged.checkpoint_path.name
        folder = self._named.parent / "quarantine"
        number = 1
        while (destination := folder / f"{source.name}-{number}").exists():
            number += 1
        if distributed.rank() == 0:
            with checkpoint_errors(damaged.checkpoint_path, "moved; move it away by hand"):
                folder.mkdir(exist_ok=True)
                os.rename(source, destination)
        distributed.all_gather_text("")  # until it is moved
        if self._opened is not None:
            self._opened.reload()
        return destination

    def is_writing(self) -> bool:
        """Return whether a checkpoint was started and is not complete."""
        return self._opened is not None and self._opened.is_saving_in_progress()

    def raise_if_failed(self) -> None:
        """Raise the error of a save in the background, if there is one.

        Raises:
            TrainingError: a checkpoint could not be written.
        """
        if self._errors:
            with self._save_errors():
                raise self._errors[0]

    def wait(self) -> None:
        """Wait until every checkpoint that was started is complete.

        Raises:
            TrainingError: a checkpoint could not be written.
        """
        if self._opened is not None:
            self._in_background(self._opened.wait_until_finished)

    def close(self) -> None:
        """Wait until everything is written, then release Orbax's resources.

        Raises:
            TrainingError: a checkpoint could not be written.
        """
        if self._opened is not None and not self._errors:
            self._in_background(self._opened.close)

    def _in_background(self, action: Callable[[], None]) -> None:
        """Wait for an action that waits for saves; stop waiting when a save of this rank fails.

        Orbax itself would wait for the other ranks then, which wait for this one.
        """
        raised: list[Exception] = []

        def run() -> None:
            try:
                action()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="wait for checkpoints", daemon=True)
        thread.start()
        while thread.is_alive() and not self._errors:
            thread.join(_POLL_SECONDS)
        self.raise_if_failed()
        if raised:
            with self._save_errors():
                raise raised[0]

    def _save_errors(self) -> AbstractContextManager[None]:
        return checkpoint_errors(
            self._named, "written; free disk space, or set run.directory to another location"
        )

    def _kept_steps(self, steps: list[int]) -> set[int]:
        """Return those of the steps whose checkpoints are retained."""
        kept = set(sorted(steps)[-self._keep :])
        losses = {step: loss for step, loss in self._validation_losses.items() if step in steps}
        if self._keep_best and losses:
            kept.add(_lowest(losses))
        return kept

    def _restore(self, step: int, **items: Any) -> Any:
        import orbax.checkpoint as ocp

        return self._manager().restore(step, args=ocp.args.Composite(**items))

    def _manager(self) -> Any:
        if self._opened is None:
            import orbax.checkpoint as ocp

            self._directory.mkdir(parents=True, exist_ok=True)
            self._errors = private_orbax.background_errors()
            registry = private_orbax.whole_shard_handlers()
            if self._keep_best:
                # A damaged checkpoint is reported when it is used.
                self._validation_losses = _saved_validation_losses(
                    self._directory, skip_damaged=True
                )
            self._opened = ocp.CheckpointManager(
                self._directory,
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
                    "about": ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_Preservation(self._kept_steps),
                    create=False,
                    multiprocessing_options=private_orbax.synchronization(distributed.count()),
                    temporary_path_class=private_orbax.before_commit(write_manifest),
                ),
            )
        return self._opened


# A change of a setting that --allow-change permitted.
_Change = TypedDict("_Change", {"step": int, "name": str, "from": Any, "to": Any})


class _Journal(TypedDict):
    """Position in the journal: return value of `graphtrain.run.metrics.Journal.position`."""

    bytes: int
    sha256: str


class _Metadata(TypedDict):
    """The item "about" of a checkpoint."""

    loader: dict[str, Any]
    arrays: dict[str, tuple[list[int], str]]
    rows: NotRequired[list[int | None] | None]
    identity: NotRequired[dict[str, Any]]
    changes: NotRequired[list[_Change]]
    journal: NotRequired[_Journal | None]
    validation_loss: NotRequired[float | None]


@dataclass(frozen=True)
class _Preservation:
    """Preservation policy of Orbax: which checkpoints are retained."""

    kept_steps: Callable[[list[int]], set[int]]  # of all complete steps, those to retain

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        kept = self.kept_steps([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]


@dataclass(frozen=True)
class CheckpointInfo:
    """Metadata of a checkpoint."""

    data_position: dict[str, Any]  # position of the data loader
    arrays: dict[str, list[Any]]  # shape and dtype by path
    rows: LayerRows | None  # layer in each row; None as in LayerOrder, and in old checkpoints
    # Settings that determine the mathematics of the run, and digests of its data, by name.
    identity: dict[str, Any] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)  # permitted by --allow-change
    journal: dict[str, Any] | None = None  # size and digest of metrics.jsonl up to this step
    validation_loss: float | None = None  # of this step, if it was evaluated


def read_checkpoint_info(directory: Path, step: int) -> CheckpointInfo:
    """Read the metadata of a checkpoint, a small JSON file written by Orbax.

    Raises:
        DamagedCheckpoint: it is a copy of the checkpoint of another step.
        TrainingError: the metadata cannot be read.
    """
    checkpoint_path = directory / str(step)
    with checkpoint_errors(
        checkpoint_path, "read; move it away to resume from an earlier checkpoint"
    ):
        metadata = private_orbax.read_json_item(checkpoint_path, "about")
        validate(_Metadata, metadata)
        if (saved := metadata.get("step", step)) != step:  # earlier versions did not record it
            raise DamagedCheckpoint(
                checkpoint_path, f"it is a copy of step {saved}, under the name of step {step}"
            )
        rows = metadata.get("rows")
        return CheckpointInfo(
            metadata["loader"],
            metadata["arrays"],
            None if rows is None else tuple(rows),
            metadata.get("identity", {}),
            metadata.get("changes", []),
            metadata.get("journal"),
            metadata.get("validation_loss"),
        )


@contextmanager
def _verified(checkpoint_path: Path) -> Iterator[None]:
    """Verify a checkpoint while the block reads it; raise at the end of the block if it is damaged.

    Several processes verify it before the block, each a share of the files: all must agree to read
    it, because reading it synchronizes them.

    Raises:
        DamagedCheckpoint: a file is not as it was written. What the block returned, or raised
            because of the damage, must not be used.
    """
    count = distributed.count()
    if count > 1:
        reason = ""
        try:
            verify_files(checkpoint_path, part=distributed.rank(), parts=count)
        except DamagedCheckpoint as error:
            reason = error.reason
        if reasons := list(filter(None, distributed.all_gather_text(reason))):
            raise DamagedCheckpoint(checkpoint_path, reasons[0])
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        verification = pool.submit(verify_files, checkpoint_path)
        try:
            yield
        except Exception as error:
            if isinstance(damage := verification.exception(), DamagedCheckpoint):
                raise damage from error
            raise
        verification.result()


def check_same_model(checkpoint_path: Path, info: CheckpointInfo, program: Program) -> None:
    """Check that a program computes the model whose weights a checkpoint contains.

    Raises:
        TrainingError: a setting of the model differs; names it with both values.
    """
    model = model_mathematics(program)
    if not model or not info.identity:
        return
    of_training = {name: value for name, value in info.identity.items() if is_of_model(name)}
    changed = differences(of_training, model)
    if changed:
        listed = "; ".join(
            f"{name} was {say(saved)} and is {say(value)}"
            for name, (saved, value) in changed.items()
        )
        raise TrainingError(
            f"{checkpoint_path} contains the weights of another model: {listed}; change it back"
        )


def part_reader(where: Path, path: str) -> Callable[[Index], np.ndarray]:
    """Return a function that reads parts of one array of a checkpoint, and only those parts.

    Args:
        where: Directory of one checkpoint.
        path: Path of the array in the state.

    Raises:
        ValueError: there is no such array, or it is damaged.
    """
    array = private_orbax.open_array(where, path)
    return lambda index: np.asarray(array[index].read().result())


def _load_reordered(
    checkpoint_path: Path,
    info: CheckpointInfo,
    described: Tree,
    arrangement: LayerOrder,
    rows: LayerRows,
    program_rows: LayerRows,
) -> Tree:
    """Load the arrays described from a checkpoint that stacks its layers in another order."""
    leaves = flatten(described)
    shapes = {path: tuple(shape) for path, (shape, _) in info.arrays.items()}
    is_stacked: dict[str, bool | None] = dict.fromkeys(shapes | leaves)
    if arrangement.by_shape:
        is_stacked = {path: shapes.get(path) != tuple(leaf.shape) for path, leaf in leaves.items()}
        if not any(is_stacked.values()):
            raise TrainingError(
                f"{checkpoint_path} stacks its layers in as many rows, but in another order: "
                f"{rows} instead of {program_rows}; resume with the pipeline.layers_per_stage it "
                "was saved with"
            )
    saved_arrays = {
        path: StackedArray(path, shape, rows, is_stacked.get(path, False))
        for path, shape in shapes.items()
    }
    program_arrays = {
        path: StackedArray(path, tuple(leaf.shape), program_rows, is_stacked[path])
        for path, leaf in leaves.items()
    }
    _compare(
        checkpoint_path,
        {
            path: [list(array.shape_without_pipeline), info.arrays[path][1]]
            for path, array in saved_arrays.items()
        },
        {
            path: [list(array.shape_without_pipeline), str(leaves[path].dtype)]
            for path, array in program_arrays.items()
        },
    )

    def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        dtype = np.dtype(leaves[path].dtype)
        return read_reordered_part(
            program_arrays[path],
            saved_arrays[path],
            index,
            part_reader(checkpoint_path, path),
            dtype,
        )

    return arrangement.load_arrays(described, read)


def restore_parameters(
    directory: Path,
    step: int,
    described: Tree,
    arrangement: LayerOrder | None = None,
    program: Program | None = None,
) -> Tree:
    """Load only the parameters of a checkpoint.

    Args:
        directory: Directory of the checkpoints.
        step: Step of the checkpoint.
        described: Tree of parameters to restore, with their shapes, dtypes and shardings.
        arrangement: Order of the layer rows, if the checkpoint may have another.
        program: Settings whose model must be that of the checkpoint.

    Raises:
        DamagedCheckpoint: a file of the checkpoint is not as it was written.
        TrainingError: the checkpoint contains other parameters, is of another model, or cannot be
            read.
    """
    if program is not None:
        verify_files(directory / str(step), only="about/")
        info = read_checkpoint_info(directory, step)
        check_same_model(directory / str(step), info, program)
    checkpoints = Checkpoints(directory, 1, arrangement)
    try:
        return checkpoints.restore(step, {"parameters": described}).state["parameters"]
    finally:
        checkpoints.close()


def restore_array(directory: Path, step: int, path: str) -> np.ndarray:
    """Load one complete array of a checkpoint's state, by its path, into host memory.

    Raises:
        TrainingError: the array cannot be read.
    """
    checkpoint_path = directory / str(step)
    with checkpoint_errors(checkpoint_path, "read"):
        return part_reader(checkpoint_path, path)(())


@contextmanager
def checkpoint_errors(path: Path, what: str) -> Iterator[None]:
    """Convert errors of TensorStore and Orbax into TrainingError: "`path` cannot be `what`".

    Not the error of a rank that waited for another one, which is lost.
    """
    try:
        yield
    except private_orbax.STORAGE_ERRORS as error:
        if private_orbax.caused_by_lost_peer(error):
            raise
        raise TrainingError(f"{path} cannot be {what} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error; only the system's words if TensorStore cites them."""
    first = str(error).partition("\n")[0]
    cited = re.search(r": ([^:]+) \[os_error_code=", first)
    return cited[1] if cited else first


def _arrays(tree: Tree) -> dict[str, list[Any]]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in flatten(tree).items()}


def _compare(checkpoint_path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    roots = {path.partition("/")[0] for path in expected}
    saved = {path: array for path, array in saved.items() if path.partition("/")[0] in roots}
    for path in saved | dict(expected):
        if saved.get(path) != expected.get(path):
            raise TrainingError(
                f"{checkpoint_path} was saved by another program: {path} is "
                f"{_say(saved.get(path))} in the checkpoint and {_say(expected.get(path))} in this "
                "program; set run.directory to a new directory, or change [program] back"
            )


def _say(array: list[Any] | None) -> str:
    return "absent" if array is None else f"{array[1]} {array[0]}"
