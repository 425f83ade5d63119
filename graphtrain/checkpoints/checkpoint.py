"""Save and restore a run's state with Orbax; a layout change is a restore.

Orbax is imported when the first checkpoint is saved or restored, not at the start of a run.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.checkpoints.layer_rows import Index, Rows, Stacked, part
from graphtrain.config.resolve import rows_of_layers, stages_of
from graphtrain.config.schema import Program, is_imported
from graphtrain.errors import TrainingError
from lowering.machine import distributed
from lowering.machine.target import Target
from lowering.trees import Tree, flatten


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    step: int  # steps taken
    state: Tree
    loader: dict[str, Any]  # where the data goes on


@dataclass(frozen=True)
class Arrangement:
    """How a program keeps its layers, and how its backend puts arrays on its devices."""

    rows: Rows | None  # None: one after the other, as many as there are
    fill: Callable[[Tree, Callable[[str, tuple[int, ...], Any], np.ndarray]], Tree]
    by_shape: bool = False  # which arrays hold layers is not in their paths

    def of_kept(self, kept: Rows | None) -> tuple[Rows, Rows] | None:
        """The rows of a checkpoint and one's own, if they differ."""
        mine = self.rows
        if self.by_shape:
            mine, kept = mine or _in_order(kept), kept or _in_order(mine)
        return None if mine is None or kept is None or mine == kept else (kept, mine)


def _in_order(rows: Rows | None) -> Rows | None:
    """The rows of the same layers without a pipeline."""
    return rows and tuple(range(sum(layer is not None for layer in rows)))


def arrangement_of(program: Program) -> Arrangement:
    """How a program keeps its layers."""
    target, imported = Target.parse(program.target), is_imported(program.model)
    if imported:
        stages = stages_of(program)
        rows = None if stages is None else stages.rows
    else:
        rows = rows_of_layers(program)
    return Arrangement(
        rows,
        lambda described, read: lowering.backend(target).fill(described, read),
        by_shape=imported,
    )


def saved_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a directory, oldest first.

    Orbax writes under a temporary name and renames, so a number alone means complete.
    """
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


class Checkpoints:
    """The checkpoints of one run; saving goes on in the background."""

    def __init__(self, directory: Path, keep: int, arrangement: Arrangement | None = None) -> None:
        """Args:
        arrangement: Of the layers; without it, checkpoints of another are of another program.
        """
        self._directory = directory.absolute()  # Orbax takes no other
        self._keep = keep
        self._arrangement = arrangement
        self._opened: Any = None

    def save(self, step: int, state: Tree, loader: Mapping[str, Any]) -> None:
        """Begin to save; returns when the arrays are copied, before they are written.

        Raises:
            TrainingError: this or an earlier checkpoint could not be written.
        """
        import orbax.checkpoint as ocp

        about: dict[str, Any] = {"loader": dict(loader), "arrays": _arrays(state)}
        if self._arrangement is not None and self._arrangement.rows is not None:
            about["rows"] = self._arrangement.rows
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(about))
        with errors(self._directory, "written; free space or set run.directory elsewhere"):
            self._manager().save(step, args=items)

    def restore(self, step: int, described: Tree) -> Saved:
        """Load a checkpoint, or part of it, into the shapes, dtypes and shardings described.

        Layers that it keeps in another arrangement are brought into the program's.

        Raises:
            TrainingError: it holds other arrays, or cannot be read.
        """
        import orbax.checkpoint as ocp

        where = self._directory / str(step)
        about = read_about(self._directory, step)
        if self._arrangement is not None and (rows := self._arrangement.of_kept(about.rows)):
            with errors(where, "read; remove it to go on from an earlier one"):
                state = _rearranged(where, about, described, self._arrangement, *rows)
            return Saved(step, state, about.loader)
        _compare(where, about.arrays, _arrays(described))
        wanted = ocp.args.PyTreeRestore(
            item=described,
            restore_args=ocp.checkpoint_utils.construct_restore_args(described),
            partial_restore=True,
        )
        with errors(where, "read; remove it to go on from an earlier one"):
            state = self._restore(step, state=wanted)["state"]
        return Saved(step, state, about.loader)

    def wait(self) -> None:
        """Return when every checkpoint begun is complete.

        Raises:
            TrainingError: a checkpoint could not be written.
        """
        if self._opened is not None:
            with errors(self._directory, "written; free space or set run.directory elsewhere"):
                self._opened.wait_until_finished()

    def close(self) -> None:
        """Wait until everything is written, and give up what Orbax holds.

        Raises:
            TrainingError: a checkpoint could not be written.
        """
        if self._opened is not None:
            with errors(self._directory, "written; free space or set run.directory elsewhere"):
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
                        active_processes=set(range(distributed.count()))
                        if distributed.count() > 1
                        else None
                    ),
                ),
            )
        return self._opened


@dataclass(frozen=True)
class About:
    """What a checkpoint says of itself."""

    loader: dict[str, Any]
    arrays: dict[str, list[Any]]  # shape and dtype by path
    rows: Rows | None  # of its layers; none in those from before they were kept


def read_about(directory: Path, step: int) -> About:
    """Read what a checkpoint says of itself; a small file of JSON that Orbax writes.

    Raises:
        TrainingError: it cannot be read.
    """
    where = directory / str(step)
    with errors(where, "read; remove it to go on from an earlier one"):
        found = json.loads((where / "about/metadata").read_text())
        rows = found.get("rows")
        return About(found["loader"], found["arrays"], None if rows is None else tuple(rows))


def read_part(where: Path, path: str) -> Callable[[Index], np.ndarray]:
    """Reads of parts of an array of a checkpoint; only those parts are read.

    Raises:
        ValueError: there is no such array, or it is damaged.
    """
    array = open_array(where, path)
    return lambda index: np.asarray(array[index].read().result())


def open_array(where: Path, path: str, *, write: bool = False, held: int = 0) -> Any:
    """An array of a checkpoint as TensorStore opens it; holds so many bytes of what it has read.

    Source: https://orbax.readthedocs.io, "Checkpoint format": a zarr array for each leaf, under the
    names of its path joined by dots, in a key-value store of OCDBT
    """
    import tensorstore

    store = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{where.absolute()}/state/"},
        "path": path.replace("/", ".") + "/",
    }
    context = {"cache_pool": {"total_bytes_limit": held}}
    spec = {"driver": "zarr", "kvstore": store, "context": context}
    return tensorstore.open(spec, open=True, read=True, write=write).result()


def _rearranged(
    where: Path, about: About, described: Tree, arrangement: Arrangement, rows: Rows, mine: Rows
) -> Tree:
    """The arrays described, from those of a checkpoint whose layers are in other rows."""
    leaves = flatten(described)
    shapes = {path: tuple(shape) for path, (shape, _) in about.arrays.items()}
    inside: dict[str, bool | None] = dict.fromkeys(shapes | leaves)
    if arrangement.by_shape:
        inside = {path: shapes.get(path) != tuple(leaf.shape) for path, leaf in leaves.items()}
        if not any(inside.values()):
            raise TrainingError(
                f"{where} keeps its blocks in as many rows, but in another order: for rows {rows} "
                f"instead of {mine}; go on with the pipeline.layers it was saved with"
            )
    kept = {
        path: Stacked(path, shape, rows, inside.get(path, False)) for path, shape in shapes.items()
    }
    wanted = {
        path: Stacked(path, tuple(leaf.shape), mine, inside[path]) for path, leaf in leaves.items()
    }
    _compare(
        where,
        {path: [list(one.plain), about.arrays[path][1]] for path, one in kept.items()},
        {path: [list(one.plain), str(leaves[path].dtype)] for path, one in wanted.items()},
    )

    def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        dtype = np.dtype(leaves[path].dtype)
        return part(wanted[path], kept[path], index, read_part(where, path), dtype)

    return arrangement.fill(described, read)


def restore_parameters(
    directory: Path, step: int, described: Tree, arrangement: Arrangement | None = None
) -> Tree:
    """Load only the parameters of a checkpoint.

    Raises:
        TrainingError: it holds other parameters, or cannot be read.
    """
    checkpoints = Checkpoints(directory, 1, arrangement)
    try:
        return checkpoints.restore(step, {"parameters": described}).state["parameters"]
    finally:
        checkpoints.close()


def restore_array(directory: Path, step: int, path: str) -> np.ndarray:
    """Load one array of a checkpoint's state by its path, whole, into the host's memory.

    Raises:
        TrainingError: it cannot be read.
    """
    where = directory / str(step)
    with errors(where, "read"):
        return read_part(where, path)(())


@contextmanager
def errors(path: Path, what: str) -> Iterator[None]:
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
