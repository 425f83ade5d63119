"""Weights of an imported model from a folder of Hugging Face, and a run's back to one.

Reading imports no PyTorch: which of a folder's tensors are the rows of an array is seen by their
names, which differ in a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.config.hf_config import read_config
from graphtrain.config.resolve import stages_of
from graphtrain.errors import WeightsError
from graphtrain.weights.files import SafetensorsFolder, open_folder
from lowering.machine.target import Target
from lowering.trees import Tree, flatten

if TYPE_CHECKING:
    from graphtrain.config.schema import Imported, Program
    from sharding_rules.pipeline import Stages

Index = tuple[slice, ...]
Fill = Callable[[Tree, Callable[[str, tuple[int, ...], Index], np.ndarray]], Tree]


class ModuleWeights:
    """A folder that transformers loads, for a run whose model is of PyTorch.

    Raises:
        WeightsError: it holds no weights.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise WeightsError(f"run.initial: there is no folder {directory}")
        self.side = directory  # its configuration and tokenizer are beside the weights
        self._directory, self._folder = directory, open_folder(directory)

    def parameters(self, described: Tree, fill: Fill, stages: Stages | None = None) -> Tree:
        """The parameters on their devices; only parts that a device holds are read.

        Args:
            described: their shapes and places.
            fill: how a backend makes arrays of parts.
            stages: of the pipeline that blocks are stored for.

        Raises:
            WeightsError: the folder lacks one, or has it in another shape.
        """
        shapes = {path: tuple(leaf.shape) for path, leaf in flatten(described).items()}
        names = {path: self._names(path, shape, stages) for path, shape in shapes.items()}

        def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
            found = names[path]
            index = tuple(slice(*one.indices(size)) for one, size in zip(index, shape, strict=True))
            if isinstance(found, str):
                return self._part(found, index)
            here = found[index[: found.ndim]]
            inner = index[found.ndim :]
            parts = [self._part(name, inner) for name in here.ravel()]
            return np.stack(parts).reshape(*here.shape, *parts[0].shape)

        return fill(described, read)

    def _part(self, name: str | None, index: Index) -> np.ndarray:
        if name is None:  # fills up a stage
            return np.zeros([one.stop - one.start for one in index], np.float32)
        if isinstance(self._folder, SafetensorsFolder):
            return self._folder.part(name, index).astype(np.float32)
        return self._folder.read(name)[index].astype(np.float32)

    def _names(self, path: str, shape: tuple[int, ...], stages: Stages | None) -> str | np.ndarray:
        """The tensor of an array, or those of its rows along its first axes."""
        dotted = path.replace("/", ".")
        there = set(self._folder.names)
        leading = 2 if stages is not None and stages.rounds > 1 else 1
        count = sum(stages.layers) if stages is not None else shape[0] if shape else 0
        for name in (dotted, dotted.partition(".")[2]):  # some folders leave out the first word
            if name in there and self._folder.shape(name) == shape:
                return name
            for rows in _rows(name, count, there):
                if all(self._folder.shape(row) == shape[leading:] for row in rows):
                    return _in_rows(rows, shape[:leading], stages)
        owner = dotted.split(".")[-2:][0]  # a parameter of the module itself has none
        alike = [name for name in there if name.rpartition(".")[0].endswith(owner)]
        found = f"; it has {alike[0]} of {self._folder.shape(alike[0])}" if alike else ""
        raise WeightsError(
            f"run.initial: {self._directory} does not hold {dotted} of shape {shape}{found}"
        )


def _in_rows(names: list[str], shape: tuple[int, ...], stages: Stages | None) -> np.ndarray:
    """Names where a run keeps them; None in a row that fills up a stage."""
    order = range(len(names)) if stages is None else stages.rows
    ordered = [None if row is None else names[row] for row in order]
    return np.array(ordered, object).reshape(shape)


def _rows(name: str, count: int, there: set[str]) -> Iterator[list[str]]:
    """Ways to put a number into a name, or to count on from one, that names as many tensors."""
    words = name.split(".")
    for place in range(1, len(words)):
        before, after = ".".join(words[:place]), ".".join(words[place:])
        yield from _counted(lambda n, b=before, a=after: f"{b}.{n}.{a}", 0, 1, count, there)
        if words[place].isdigit() and place + 1 < len(words):
            after = ".".join(words[place + 1 :])
            for period in range(2, 9):
                yield from _counted(
                    lambda n, b=before, a=after: f"{b}.{n}.{a}",
                    int(words[place]),
                    period,
                    count,
                    there,
                )


def _counted(
    name: Callable[[int], str], first: int, step: int, count: int, there: set[str]
) -> Iterator[list[str]]:
    rows = [name(first + step * row) for row in range(count)]
    if rows and all(row in there for row in rows) and name(first + step * count) not in there:
        yield rows


def export(
    program: Program,
    directory: Path,
    step: int,
    destination: Path,
    progress: Callable[[int, int], None],
) -> tuple[str, int, int]:
    """Write a checkpoint as a folder that transformers loads; its kind, numbers and tensors.

    Raises:
        WeightsError: the model is a module of the user's own, of which transformers knows nothing.
    """
    import lowering
    from graphtrain.checkpoints.checkpoint import restore_array
    from graphtrain.torch_frontend.model import open_model
    from graphtrain.weights.writer import Writer

    model: Imported = program.model  # pyright: ignore[reportAssignmentType]
    host = Target.parse("cpu:1")
    lowering.backend(host).described_devices(host)  # JAX is to look for no other device
    opened, stages = open_model(model), stages_of(program)
    shapes = {name: tuple(one.shape) for name, one in opened.made.parameters().items()}
    writer = Writer(destination, {name: (np.dtype(np.float32), s) for name, s in shapes.items()})
    stored = opened.stored()
    for done, (path, names) in enumerate(stored.items()):
        progress(done, len(stored))
        array = restore_array(directory / "checkpoints", step, f"parameters/{path}")
        rows = _of_blocks(array, stages) if opened.is_stacked(path) else array[None]
        for name, row in zip(names, rows, strict=True):
            writer.write(name, row)
    writer.close()
    numbers = sum(int(np.prod(shape)) for shape in shapes.values())
    return _write_config(model, destination), numbers, len(shapes)


def _of_blocks(array: np.ndarray, stages: Stages | None) -> np.ndarray:
    """A row for each block, of an array that may be stored for a pipeline."""
    if stages is None:
        return array
    rows = [stages.rows.index(block) for block in range(sum(stages.layers))]
    leading = 2 if stages.rounds > 1 else 1
    return array.reshape(len(stages.rows), *array.shape[leading:])[rows]


def _write_config(model: Imported, destination: Path) -> str:
    """The configuration that the model was made from; a module of the user's own has none."""
    if model.hf is None:
        return str(model.torch)
    config: dict[str, Any] = read_config(model.hf, model.overrides)
    told = config | {"dtype": "float32"}
    (destination / "config.json").write_text(json.dumps(told, indent=2) + "\n")
    return config["model_type"]
