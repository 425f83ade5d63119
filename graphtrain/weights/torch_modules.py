"""Import of an imported model's weights from a Hugging Face folder, and export to one.

Reading imports no PyTorch: the tensors that form the rows of a stacked array are recognised by
their names, which differ in the layer index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.config.hf_config import read_config
from graphtrain.errors import WeightsError
from graphtrain.weights.files import SafetensorsFiles, open_weight_files
from lowering.machine.target import Target
from lowering.trees import Tree, flatten

if TYPE_CHECKING:
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import TorchModel
    from sharding_rules.pipeline import Stages

Index = tuple[slice, ...]
Fill = Callable[[Tree, Callable[[str, tuple[int, ...], Index], np.ndarray]], Tree]


class HuggingFaceWeights:
    """Weights in a folder that transformers can load, for a run of an imported model.

    Raises:
        WeightsError: the folder does not exist, or contains no weights.
    """

    def __init__(self, directory: Path) -> None:
        """Open the folder; tensors are read later."""
        if not directory.is_dir():
            raise WeightsError(f"run.init_from: the folder {directory} does not exist")
        self.side = directory  # folder of config.json and the tokenizer
        self._directory, self._folder = directory, open_weight_files(directory)

    def parameters(self, described: Tree, fill: Fill, stages: Stages | None = None) -> Tree:
        """Read the parameters onto their devices; only the shards of this process are read.

        Args:
            described: shape and sharding of every parameter.
            fill: builds arrays from a function that reads one shard.
            stages: pipeline stages that the layer rows are ordered for.

        Raises:
            WeightsError: a parameter is missing in the folder, or has another shape there.
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
        if name is None:  # a padding row of a stage
            return np.zeros([one.stop - one.start for one in index], np.float32)
        if isinstance(self._folder, SafetensorsFiles):
            return self._folder.part(name, index).astype(np.float32)
        return self._folder.read(name)[index].astype(np.float32)

    def _names(self, path: str, shape: tuple[int, ...], stages: Stages | None) -> str | np.ndarray:
        """Return the name of an array's tensor, or an array of the names of its rows."""
        dotted = path.replace("/", ".")
        there = set(self._folder.names)
        leading = 2 if stages is not None and stages.rounds > 1 else 1
        count = sum(stages.layers) if stages is not None else shape[0] if shape else 0
        for name in (dotted, dotted.partition(".")[2]):  # some folders omit the first component
            if name in there and self._folder.shape(name) == shape:
                return name
            for rows in _rows(name, count, there):
                if all(self._folder.shape(row) == shape[leading:] for row in rows):
                    return _in_layer_order(rows, shape[:leading], stages)
        owner = dotted.split(".")[-2:][0]  # a parameter of the root module has no owner
        alike = [name for name in there if name.rpartition(".")[0].endswith(owner)]
        found = f"; it contains {alike[0]} of shape {self._folder.shape(alike[0])}" if alike else ""
        raise WeightsError(
            f"run.init_from: {self._directory} does not contain {dotted} of shape {shape}{found}"
        )


def _in_layer_order(names: list[str], shape: tuple[int, ...], stages: Stages | None) -> np.ndarray:
    """Arrange names in the run's order of layer rows; None for padding rows."""
    order = range(len(names)) if stages is None else stages.rows
    ordered = [None if row is None else names[row] for row in order]
    return np.array(ordered, object).reshape(shape)


def _rows(name: str, count: int, there: set[str]) -> Iterator[list[str]]:
    """Yield lists of `count` tensor names that result from a layer index in a name.

    The index is inserted (period 1), or replaces a position of a period of 2 to 8 blocks.
    """
    words = name.split(".")
    for place in range(1, len(words)):
        before, after = ".".join(words[:place]), ".".join(words[place:])
        yield from _existing_rows(lambda n, b=before, a=after: f"{b}.{n}.{a}", 0, 1, count, there)
        if words[place].isdigit() and place + 1 < len(words):
            after = ".".join(words[place + 1 :])
            for period in range(2, 9):
                yield from _existing_rows(
                    lambda n, b=before, a=after: f"{b}.{n}.{a}",
                    int(words[place]),
                    period,
                    count,
                    there,
                )


def _existing_rows(
    name: Callable[[int], str], first: int, step: int, count: int, there: set[str]
) -> Iterator[list[str]]:
    """Yield the names of all rows if exactly these exist."""
    rows = [name(first + step * row) for row in range(count)]
    if rows and all(row in there for row in rows) and name(first + step * count) not in there:
        yield rows


def export(
    program: ResolvedProgram,
    directory: Path,
    step: int,
    destination: Path,
    progress: Callable[[int, int], None],
) -> tuple[str, int, int]:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        program: the program of the run; its model is imported.
        directory: of the run.
        step: of the checkpoint.
        destination: folder to write.
        progress: called with the number of arrays written, and of all arrays.

    Returns:
        The model_type (or program.model.torch), the number of weights, and of tensors.
    """
    import lowering
    from graphtrain.checkpoints.checkpoint import restore_array
    from graphtrain.torch_frontend.model import open_model
    from graphtrain.weights.writer import SafetensorsWriter

    model: TorchModel = program.model  # pyright: ignore[reportAssignmentType]
    host = Target.parse("cpu:1")
    lowering.backend(host).compile_devices(host)  # keeps JAX from initialising other devices
    opened, stages = open_model(model), program.stages
    shapes = {name: tuple(one.shape) for name, one in opened.meta.parameters().items()}
    writer = SafetensorsWriter(
        destination, {name: (np.dtype(np.float32), s) for name, s in shapes.items()}
    )
    stored = opened.parameter_names_by_path()
    for done, (path, names) in enumerate(stored.items()):
        progress(done, len(stored))
        array = restore_array(directory / "checkpoints", step, f"parameters/{path}")
        rows = _block_rows(array, stages) if opened.is_stacked(path) else array[None]
        for name, row in zip(names, rows, strict=True):
            writer.write(name, row)
    writer.close()
    numbers = sum(int(np.prod(shape)) for shape in shapes.values())
    return _write_config(model, destination), numbers, len(shapes)


def _block_rows(array: np.ndarray, stages: Stages | None) -> np.ndarray:
    """Return one row per block, in order, of an array that may be ordered for a pipeline."""
    if stages is None:
        return array
    rows = [stages.rows.index(block) for block in range(sum(stages.layers))]
    leading = 2 if stages.rounds > 1 else 1
    return array.reshape(len(stages.rows), *array.shape[leading:])[rows]


def _write_config(model: TorchModel, destination: Path) -> str:
    """Write config.json, unless the model is a module of the user; return the model_type."""
    if model.hf is None:
        return str(model.torch)
    config: dict[str, Any] = read_config(model.hf, model.overrides)
    told = config | {"dtype": "float32"}
    (destination / "config.json").write_text(json.dumps(told, indent=2) + "\n")
    return config["model_type"]
