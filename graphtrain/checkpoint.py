"""Save and restore a run's state with Orbax; a layout change is a restore.

Orbax is imported when the first checkpoint is saved or restored, not at the start of a run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.errors import TrainingError
from lowering import processes
from lowering.trees import Tree, flatten, unflatten


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    step: int  # steps taken
    state: Tree
    loader: dict[str, Any]  # where the data goes on


def saved_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a directory, oldest first.

    Orbax writes under a temporary name and renames, so a number alone means complete.
    """
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


class Checkpoints:
    """The checkpoints of one run; saving goes on in the background."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory.absolute()  # Orbax takes no other
        self._keep = keep
        self._opened: Any = None

    def save(self, step: int, state: Tree, loader: Mapping[str, Any]) -> None:
        """Begin to save; returns when the arrays are copied, before they are written.

        Raises:
            TrainingError: this or an earlier checkpoint could not be written.
        """
        import orbax.checkpoint as ocp

        about = {"loader": dict(loader), "arrays": _arrays(state)}
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(about))
        with _errors(self._directory, "written; free space or set run.directory elsewhere"):
            self._manager().save(step, args=items)

    def restore(self, step: int, described: Tree) -> Saved:
        """Load a checkpoint, or part of it, into the shapes, dtypes and shardings described.

        Raises:
            TrainingError: it holds other arrays, or cannot be read.
        """
        import orbax.checkpoint as ocp

        where = self._directory / str(step)
        wanted = ocp.args.PyTreeRestore(
            item=described,
            restore_args=ocp.checkpoint_utils.construct_restore_args(described),
            partial_restore=True,
        )
        with _errors(where, "read; remove it to go on from an earlier one"):
            about = self._restore(step, about=ocp.args.JsonRestore())["about"]
            _compare(where, about["arrays"], _arrays(described))
            state = self._restore(step, state=wanted)["state"]
        return Saved(step, state, about["loader"])

    def wait(self) -> None:
        """Return when every checkpoint begun is complete.

        Raises:
            TrainingError: a checkpoint could not be written.
        """
        if self._opened is not None:
            with _errors(self._directory, "written; free space or set run.directory elsewhere"):
                self._opened.wait_until_finished()

    def close(self) -> None:
        """Wait until everything is written, and give up what Orbax holds.

        Raises:
            TrainingError: a checkpoint could not be written.
        """
        if self._opened is not None:
            with _errors(self._directory, "written; free space or set run.directory elsewhere"):
                self._opened.close()

    def _restore(self, step: int, **items: Any) -> Any:
        import orbax.checkpoint as ocp

        return self._manager().restore(step, args=ocp.args.Composite(**items))

    def _manager(self) -> Any:
        if self._opened is None:
            import jax
            import orbax.checkpoint as ocp

            self._directory.mkdir(parents=True, exist_ok=True)
            # By default the replicas of an array each write a slice of it, and JAX compiles the
            # slicing in the middle of the run.
            arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
            registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
            self._opened = ocp.CheckpointManager(
                self._directory,
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
                    "about": ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=self._keep,
                    create=False,  # Orbax refuses to with named processes
                    # Named processes meet at a barrier of the service; else at a collective, which
                    # JAX would compile.
                    multiprocessing_options=ocp.options.MultiprocessingOptions(
                        active_processes=set(range(processes.count()))
                        if processes.count() > 1
                        else None
                    ),
                ),
            )
        return self._opened


def restore_parameters(directory: Path, step: int, described: Tree) -> Tree:
    """Load only the parameters of a checkpoint.

    Raises:
        TrainingError: it holds other parameters, or cannot be read.
    """
    checkpoints = Checkpoints(directory, keep=1)
    try:
        return checkpoints.restore(step, {"parameters": described}).state["parameters"]
    finally:
        checkpoints.close()


def restore_array(directory: Path, step: int, path: str) -> np.ndarray:
    """Load one array of a checkpoint's state by its path, whole, into the host's memory.

    Raises:
        TrainingError: it cannot be read.
    """
    import orbax.checkpoint as ocp

    where = directory.absolute() / str(step)
    restore = ocp.args.PyTreeRestore(
        item=unflatten({path: 0}),
        restore_args=unflatten({path: ocp.RestoreArgs(restore_type=np.ndarray)}),
        partial_restore=True,
    )
    with _errors(where, "read"), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as opened:
        return flatten(opened.restore(where / "state", args=restore))[path]


@contextmanager
def _errors(path: Path, what: str) -> Iterator[None]:
    """TensorStore raises ValueError for a full disk and for damaged files, Orbax OSError."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(f"{path} cannot be {what} ({reason})") from error


def _arrays(tree: Tree) -> dict[str, list[Any]]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in flatten(tree).items()}


def _compare(where: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    parts = {path.partition("/")[0] for path in wanted}
    saved = {path: array for path, array in saved.items() if path.partition("/")[0] in parts}
    for path in saved | dict(wanted):
        if saved.get(path) != wanted.get(path):
            raise TrainingError(
                f"{where} is of another program: {path} is {_say(saved.get(path))} there and "
                f"{_say(wanted.get(path))} here; set run.directory to a new one, or change "
                "[program] back"
            )


def _say(array: list[Any] | None) -> str:
    return "absent" if array is None else f"{array[1]} {array[0]}"
