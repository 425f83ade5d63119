"""Checkpoints: save and restore a run's state with Orbax, also into another mesh or pipeline.

Orbax is imported when the first checkpoint is saved or restored, not at the start of a run.
"""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.arrays import check_same_arrays, describe_arrays, part_reader
from graphtrain.checkpoints.info import check_same_model, read_checkpoint_info
from graphtrain.checkpoints.joined_blocks import load_joined, rows_by_path
from graphtrain.checkpoints.layer_order import LayerOrder, load_reordered, shape_pairs
from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files, write_manifest
from graphtrain.checkpoints.steps import Retention, saved_steps, saved_validation_losses
from graphtrain.checkpoints.storage_errors import checkpoint_errors
from graphtrain.checkpoints.verified_reading import verified_while_reading
from graphtrain.config.schema import Program
from graphtrain.errors import TrainingError
from lowering.trees import Tree
from lowering.xla import distributed

_POLL_SECONDS = 0.1  # between looks for an error in the background


@dataclass(frozen=True)
class RestoredState:
    """Restored contents of a checkpoint."""

    step: int  # number of completed steps
    state: Tree
    data_position: dict[str, Any]  # position of the data loader


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


def quarantine_path(run_directory: Path, step: int) -> Path:
    """Return a new path in the folder `quarantine` of a run, which is created.

    Raises:
        OSError: the folder cannot be created.
    """
    folder, number = run_directory / "quarantine", 1
    folder.mkdir(exist_ok=True)
    while (path := folder / f"{step}-{number}").exists():
        number += 1
    return path


class Checkpoints:
    """Checkpoints of one run, saved in the background."""

    def __init__(
        self,
        directory: Path,
        retention: Retention,
        layer_order: LayerOrder | None = None,
        *,
        steps_in_use: Callable[[], set[int]] = set,
        is_shared: bool = True,
    ) -> None:
        """Open the checkpoints in a directory, which the first save creates.

        Args:
            directory: The directory of the checkpoints, with one subdirectory for each step.
            retention: Which checkpoints to retain; others are deleted.
            layer_order: Order of the layer rows. Without it, checkpoints with another order cannot
                be restored.
            steps_in_use: Returns the steps that must not be deleted now, because they are uploaded.
            is_shared: Whether all processes of the run see the same directory.
        """
        self._retention = retention
        self._steps_in_use, self._is_shared = steps_in_use, is_shared
        self._named = directory  # as in messages
        self._directory = directory.absolute()  # Orbax requires an absolute path
        self._layer_order = layer_order
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
        is_whole: bool = True,
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
            is_whole: Whether disks of single hosts are not enough; here they are never used.
            records: More JSON values to keep, by the name of their field in `CheckpointInfo`.

        Raises:
            TrainingError: this or an earlier checkpoint could not be written.
        """
        import orbax.checkpoint as ocp

        metadata = self._metadata(step, state, loader, validation_loss, records)
        self.wait()
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(metadata)
        )
        with self._save_errors():
            manager = self._manager()
            if validation_loss is not None:
                self._validation_losses[step] = validation_loss
            manager.save(step, args=items)

    def _metadata(
        self,
        step: int,
        state: Tree,
        loader: Mapping[str, Any],
        validation_loss: float | None,
        records: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what `CheckpointInfo` reads; arguments are as of `save`."""
        metadata = {"step": step, "loader": dict(loader), "arrays": describe_arrays(state)}
        metadata |= records
        if validation_loss is not None:
            metadata["validation_loss"] = validation_loss
        if self._layer_order is not None and self._layer_order.rows is not None:
            metadata["rows"] = self._layer_order.rows
        return metadata

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
        with verified_while_reading(self._named / str(step), is_shared=self._is_shared):
            return self._restore_unverified(step, described)

    def _restore_unverified(self, step: int, described: Tree) -> RestoredState:
        import orbax.checkpoint as ocp

        checkpoint_path = self._directory / str(step)
        info = read_checkpoint_info(self._directory, step)
        shapes = shape_pairs(info.arrays, described)
        if self._layer_order is not None and (
            rows := self._layer_order.reordering_from(info.rows, shapes)
        ):
            with checkpoint_errors(
                checkpoint_path, "read; move it away to resume from an earlier checkpoint"
            ):
                state = load_reordered(checkpoint_path, info, described, self._layer_order, *rows)
            return RestoredState(step, state, info.data_position)
        if self._layer_order is not None and (rows := rows_by_path(info.arrays, described)):
            open_array = partial(part_reader, checkpoint_path)
            load = self._layer_order.load_arrays
            with checkpoint_errors(
                checkpoint_path, "read; move it away to resume from an earlier checkpoint"
            ):
                state = load_joined(checkpoint_path, info.arrays, described, rows, load, open_array)
            return RestoredState(step, state, info.data_position)
        check_same_arrays(checkpoint_path, info.arrays, describe_arrays(described))
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

        Called on every rank; rank 0 moves it, or each its own.

        Raises:
            TrainingError: it cannot be moved.
        """
        source = self._directory / damaged.checkpoint_path.name
        with checkpoint_errors(damaged.checkpoint_path, "moved; move it away by hand"):
            destination = quarantine_path(self._named.parent, int(source.name))
            if distributed.rank() == 0 or not self._is_shared:
                shutil.move(source, destination)  # which may be on another disk
        distributed.all_gather_text("")  # until it is moved
        self.reread()
        return destination

    def is_due_whole(self, step: int) -> bool:
        """Return whether the checkpoint of a step must be one that all hosts share."""
        return True

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint; 0 if there is none."""
        return max(saved_steps(self._named), default=0)

    def path(self, step: int) -> Path:
        """Return the directory of a checkpoint."""
        return self._named / str(step)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return saved_steps(self._named)

    def reread(self) -> None:
        """Look again which checkpoints there are, after others were put there."""
        if self._opened is not None:
            self._opened.reload()

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
        losses = {step: self._validation_losses.get(step) for step in steps}
        return self._retention.kept(losses) | self._steps_in_use()

    def _restore(self, step: int, **items: Any) -> Any:
        import orbax.checkpoint as ocp

        return self._manager().restore(step, args=ocp.args.Composite(**items))

    def _manager(self) -> Any:
        if self._opened is None:
            import orbax.checkpoint as ocp

            self._directory.mkdir(parents=True, exist_ok=True)
            self._errors = private_orbax.background_errors()
            registry = private_orbax.whole_shard_handlers()
            if self._retention.best:
                # A damaged checkpoint is reported when it is used.
                self._validation_losses = saved_validation_losses(
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


@dataclass(frozen=True)
class _Preservation:
    """Preservation policy of Orbax: which checkpoints are retained."""

    kept_steps: Callable[[list[int]], set[int]]  # of all complete steps, those to retain

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        kept = self.kept_steps([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]


def restore_parameters(
    directory: Path,
    step: int,
    described: Tree,
    layer_order: LayerOrder | None = None,
    program: Program | None = None,
) -> Tree:
    """Load only the parameters of a checkpoint.

    Args:
        directory: Directory of the checkpoints.
        step: Step of the checkpoint.
        described: Tree of parameters to restore, with their shapes, dtypes and shardings.
        layer_order: Order of the layer rows, if the checkpoint may have another.
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
    checkpoints = Checkpoints(directory, Retention(1), layer_order)
    try:
        return checkpoints.restore(step, {"parameters": described}).state["parameters"]
    finally:
        checkpoints.close()
