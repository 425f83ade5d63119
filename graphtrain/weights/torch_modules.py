"""Import of an imported model's weights from a Hugging Face folder, and export to one.

Reading imports no PyTorch: the tensors that form the rows of a stacked array are recognised by
their names, which differ in the layer index.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.config.hf_config import config_path, read_config
from graphtrain.config.hf_images import PROCESSOR_FILES
from graphtrain.config.hf_quantization import QUANTIZATION_CONFIG
from graphtrain.errors import WeightsError
from graphtrain.torch_frontend.block_ranges import blocks_of
from graphtrain.weights.expert_files import Index, ModuleFiles
from graphtrain.weights.files import numpy_dtype_of
from graphtrain.weights.finite import ExportedValues, count_not_finite, require_finite
from graphtrain.weights.padded_parts import is_stored_unpadded, padded_part, zeros_of
from graphtrain.weights.quantized_files import open_hugging_face
from graphtrain.weights.stacked_orders import block_rows, layer_count, stacked_orders
from graphtrain.weights.writer import MAX_FILE_BYTES, SafetensorsWriter
from lowering.machine.extras import optional_import
from lowering.machine.target import Target
from lowering.trees import Tree, flatten

if TYPE_CHECKING:
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import TorchModel
    from graphtrain.torch_frontend.meta_module import MetaModule
    from graphtrain.torch_frontend.model import OpenedModel
    from graphtrain.weights.published import PublishedFiles
    from sharding_rules.pipeline import LayerRows, Stages

PartReader = Callable[[str, tuple[int, ...], Index], np.ndarray]
Fill = Callable[[Tree, PartReader], Tree]

_WEIGHT_FILES = (".safetensors", ".bin")
# Parameters that transformers 5 has renamed in its modules, but not in folders: GPT-NeoX.
_RENAMED = {"lm_head.weight": "embed_out.weight"}


class HuggingFaceWeights:
    """Weights in a folder that transformers can load, for a run of an imported model.

    Args:
        directory: The folder.
        model: The imported model, to convert weights that are published in another form than its
            module has, and to recognise tensors that it does not read.

    Raises:
        WeightsError: the folder does not exist, or contains no weights.
    """

    def __init__(self, directory: Path, model: TorchModel | None = None) -> None:
        """Open the folder; tensors are read later."""
        if not directory.is_dir():
            raise WeightsError(f"run.init_from: the folder {directory} does not exist")
        self.directory = self.side = directory  # also of config.json and the tokenizer
        self._files, self._model = open_hugging_face(directory), model
        self._folder: ModuleFiles | PublishedFiles = ModuleFiles(self._files)

    def parameters(self, described: Tree, fill: Fill, stages: Stages | None = None) -> Tree:
        """Read the parameters onto their devices; only the shards of this process are read.

        Args:
            described: shape and sharding of every parameter.
            fill: builds arrays from a function that reads one shard.
            stages: pipeline stages that the layer rows are ordered for.

        Raises:
            WeightsError: a parameter is missing in the folder, or has another shape there; or the
                folder has a tensor that the model does not have.
        """
        shapes = {path: tuple(leaf.shape) for path, leaf in flatten(described).items()}
        return fill(described, self.part_reader(shapes, stages))

    def part_reader(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        stages: Stages | None = None,
        *,
        is_complete: bool = True,
    ) -> PartReader:
        """Return a function that reads parts of parameters, by path and unsharded shape.

        Args:
            shapes: shapes of the parameters, by path.
            stages: pipeline stages that the layer rows are ordered for.
            is_complete: whether these are all parameters, so that no other tensor may be in the
                folder.

        Raises:
            WeightsError: as of `parameters`.
        """
        names = self._all_names(shapes, stages, is_complete=is_complete)

        def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
            tensor_names = names[path]
            index = tuple(
                slice(*axis_slice.indices(size))
                for axis_slice, size in zip(index, shape, strict=True)
            )
            if isinstance(tensor_names, str):
                return self._part(tensor_names, index)
            row_names = tensor_names[index[: tensor_names.ndim]]
            inner = index[tensor_names.ndim :]
            rows = [self._part(name, inner) for name in row_names.ravel()]
            return np.stack(rows).reshape(*row_names.shape, *rows[0].shape)

        return read

    def _all_names(
        self, shapes: Mapping[str, tuple[int, ...]], stages: Stages | None, *, is_complete: bool
    ) -> dict[str, str | np.ndarray]:
        """Return the names of each array's tensors; every tensor of a complete folder is read.

        PyTorch and transformers are imported only if some names are not those of the module.
        """

        def names_by_path() -> dict[str, str | np.ndarray]:
            return {path: self._names(path, shape, stages) for path, shape in shapes.items()}

        model = self._model
        if model is None:
            return names_by_path()
        try:
            names = names_by_path()
        except WeightsError:
            if model.hf is None:
                raise
            names = None
        if names is not None and not (is_complete and self._unread(names)):
            return names
        module = _module_of(model)
        if model.hf is not None:
            with optional_import("run.init_from: a folder with other names than the module", "hf"):
                from graphtrain.weights.published import PublishedFiles

            self._folder = PublishedFiles(self._files, module.module)
            names, unread = names_by_path(), self._folder.unread
        else:
            assert names is not None
            stored = module.module.state_dict()
            unread = [name for name in self._unread(names) if name not in stored]
        if is_complete:
            _refuse([*unread, *self._changed_buffers(module)], self.directory)
            self._check_tied(module)
        return names

    def _unread(self, names: Mapping[str, str | np.ndarray]) -> list[str]:
        """Return the tensors of the folder that are in no array."""
        read = {
            source
            for array in names.values()
            for name in (np.array(array, object).ravel())
            if name is not None
            for source in self._folder.sources(name)
        }
        return [name for name in self._files.names if name not in read]

    def _check_tied(self, module: MetaModule) -> None:
        """Refuse a folder with two tensors of a parameter that the module has once.

        transformers 5 then does not tie them.
        """
        names, first_names = set(self._folder.names), {}
        for name, parameter in module.module.named_parameters(remove_duplicate=False):
            first = first_names.setdefault(id(parameter), name)
            if first == name or not {first, name} <= names:
                continue
            if not np.array_equal(self._whole(first), self._whole(name)):
                raise WeightsError(
                    f"run.init_from: {self.directory} contains a {name} that differs from {first}, "
                    "though the model ties them; set tie_word_embeddings = false in "
                    "program.model.overrides to use it, or remove it from the weights"
                )

    def _whole(self, name: str) -> np.ndarray:
        return self._folder.part(name, tuple(map(slice, self._folder.shape(name))))

    def _changed_buffers(self, module: MetaModule) -> list[str]:
        """Return the persistent buffers whose values in the folder are not those of the module.

        Such buffers are constants of the compiled program.
        """
        names = set(self._folder.names)

        def is_changed(name: str, buffer: np.ndarray) -> bool:
            source, *_ = self._folder.sources(name)
            return not np.array_equal(self._files.constant(source), buffer)

        return [
            name
            for name, buffer in stored_buffers(module).items()
            if name in names and is_changed(name, buffer)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the folder's tensors."""
        return self._files.names

    @property
    def files(self) -> list[Path]:
        """All files that the tensors are read from."""
        return sorted(
            path
            for path in self.directory.iterdir()
            if path.suffix in _WEIGHT_FILES or path.name == "config.json"
        )

    def _part(self, name: str | None, index: Index) -> np.ndarray:
        if name is None:  # a padding row of a stage
            return zeros_of(index)
        shape = self._folder.shape(name)
        values = padded_part(lambda inside: self._folder.part(name, inside), shape, index)
        if count_not_finite(values) and not self._is_mask(name, values):
            require_finite(values, name, self.directory)
        return values

    def _is_mask(self, name: str, values: np.ndarray) -> bool:
        """Return whether the module's own initial values are infinite, as those of a mask are."""
        if self._model is None or np.isnan(values).any():
            return False
        operations = _module_of(self._model).initializers.get(name, ())
        return any(operation.has_infinite_values for operation in operations)

    def _has_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor has this shape, but for rows that pad the vocabulary."""
        found, model = self._folder.shape(name), self._model
        if model is None or model.vocab is None:
            return found == shape
        return is_stored_unpadded(found, shape, model.vocab, model.vocab_tokens)

    def _names(self, path: str, shape: tuple[int, ...], stages: Stages | None) -> str | np.ndarray:
        """Return the name of an array's tensor, or an array of the names of its rows."""
        dotted = path.replace("/", ".")
        available_names = set(self._folder.names)
        # Some folders omit the first component.
        for name in (dotted, dotted.partition(".")[2], _RENAMED.get(dotted, dotted)):
            if name in available_names and self._has_shape(name, shape):
                return name
            for order, leading in stacked_orders(shape, stages):
                for rows in rows_of(name, layer_count(order), available_names):
                    if all(self._has_shape(row, shape[leading:]) for row in rows):
                        return _in_layer_order(rows, shape[:leading], order)
        module_name = dotted.split(".")[-2:][0]  # a parameter of the root module has no owner
        similar_names = [
            name for name in available_names if name.rpartition(".")[0].endswith(module_name)
        ]
        hint = (
            f"; it contains {similar_names[0]} of shape {self._folder.shape(similar_names[0])}"
            if similar_names
            else ""
        )
        raise WeightsError(
            f"run.init_from: {self.directory} does not contain {dotted} of shape {shape}{hint}"
        )


def unpadded_module(opened: OpenedModel) -> MetaModule:
    """Return a model's module without rows that pad the vocabulary, and without weights."""
    model = opened.settings
    return opened.meta if model.vocab_padding is None else _module_of(model.without_padding())


def _module_of(model: TorchModel) -> MetaModule:
    """Build the module without weights."""
    purpose = "run.init_from: a folder with tensors that are no parameters of the module"
    with optional_import(purpose, "torch"):
        from graphtrain.torch_frontend.meta_module import build_on_meta
        from graphtrain.torch_frontend.model import factory
    return build_on_meta(factory(model))


def stored_buffers(module: MetaModule) -> dict[str, np.ndarray]:
    """Return the constants of a module that folders contain, such as the tables of hash routing."""
    stored = module.module.state_dict()
    return {name: one.numpy() for name, one in module.buffers.items() if name in stored}


def _refuse(names: list[str], directory: Path) -> None:
    """Refuse a folder with tensors that nothing reads.

    Raises:
        WeightsError: there are such tensors.
    """
    if names:
        from graphtrain.weights.convert import first_names

        raise WeightsError(
            f"run.init_from: {directory} contains {first_names(sorted(names))}, which the model "
            "does not read, so that its results would differ; check that program.model.hf and "
            "its overrides are those of this folder"
        )


def _in_layer_order(names: list[str], shape: tuple[int, ...], order: LayerRows) -> np.ndarray:
    """Arrange names in the run's order of layer rows; None for padding rows."""
    ordered = [None if row is None else names[row] for row in order]
    return np.array(ordered, object).reshape(shape)


def rows_of(name: str, count: int, available_names: set[str]) -> Iterator[list[str]]:
    """Yield lists of `count` tensor names that result from a layer index in a name.

    The index is inserted (period 1), or replaces a position of a period of blocks, or the numbers
    of some blocks of a list.
    """
    components = name.split(".")
    for position in range(1, len(components)):
        prefix, suffix = ".".join(components[:position]), ".".join(components[position:])
        rows = [f"{prefix}.{number}.{suffix}" for number in range(count)]
        after = f"{prefix}.{count}.{suffix}"
        if rows and available_names.issuperset(rows) and after not in available_names:
            yield rows
        suffix = ".".join(components[position + 1 :])
        if components[position].isdigit() and suffix:
            numbers = _periodic_rows(
                int(components[position]), _numbers(prefix, suffix, available_names), count
            )
            if numbers:
                yield [f"{prefix}.{number}.{suffix}" for number in numbers]
        blocks = blocks_of(components[position])
        if blocks is not None and len(blocks) == count:
            rows = [f"{prefix}.{number}.{suffix}" for number in blocks]
            if available_names.issuperset(rows):
                yield rows


def _numbers(prefix: str, suffix: str, available_names: set[str]) -> set[int]:
    """Return the numbers between a prefix and a suffix in the names of tensors."""
    start, end = f"{prefix}.", f".{suffix}"
    middles = (
        name[len(start) : -len(end)]
        for name in available_names
        if name.startswith(start) and name.endswith(end)
    )
    return {int(middle) for middle in middles if middle.isdigit()}


def _periodic_rows(position: int, numbers: set[int], count: int) -> range:
    """Return the numbers of the blocks at a position of a period; empty if there are none.

    Args:
        position: Position in the period.
        numbers: Numbers of the blocks that have a tensor of this name; those at a position have all
            of them, or none.
        count: Number of periods.
    """
    for period in range(max(2, position + 1), max(numbers, default=0) + 1):
        is_inside = max(numbers) < count * period
        places = {number % period for number in numbers | {position}}
        rows = {place: range(place, count * period, period) for place in places}
        if is_inside and all(numbers.issuperset(inside) for inside in rows.values()):
            return rows[position]
    return range(0)


def export(
    program: ResolvedProgram,
    directory: Path,
    step: int,
    destination: Path,
    progress: Callable[[int, int], None],
    dtype: str = "float32",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> tuple[str, int, int]:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        program: the program of the run; its model is imported.
        directory: of the run.
        step: of the checkpoint.
        destination: folder to write.
        progress: called with the number of arrays written, and of all arrays.
        dtype: of the written weights.
        max_file_bytes: maximum size of a file.

    Returns:
        The model_type (or program.model.torch), the number of weights, and of tensors.
    """
    import lowering
    from graphtrain.checkpoints.manifest import verify_files
    from graphtrain.torch_frontend.language_model import TorchLanguageModel

    verify_files(directory / "checkpoints" / str(step))
    model: TorchModel = program.model  # pyright: ignore[reportAssignmentType]
    host = Target.parse("cpu:1")
    lowering.backend(host).compile_devices(host)  # keeps JAX from initialising other devices
    opened = TorchLanguageModel(model).opened()
    module = unpadded_module(opened)
    buffers = stored_buffers(module)
    parameters = {name: tuple(one.shape) for name, one in module.parameters().items()}
    published = None
    if model.hf is not None:
        from graphtrain.weights.published import SavedTensors

        shapes = parameters | {name: buffer.shape for name, buffer in buffers.items()}
        published = SavedTensors(module.module, shapes)
    constants: dict[str, np.ndarray] = {}  # they keep their dtype
    for name, buffer in buffers.items():
        constants |= dict(published.add(name, buffer) if published else [(name, buffer)])
    tensors = published.shapes if published else parameters
    written_dtype = numpy_dtype_of("--dtype", dtype)
    specs = {name: (written_dtype, shape) for name, shape in tensors.items()}
    specs |= {name: (array.dtype, array.shape) for name, array in constants.items()}
    writer = SafetensorsWriter(destination, specs, max_file_bytes)
    for name, array in constants.items():
        writer.write(name, array)
    values = ExportedValues()
    rows_by_path = _exported_rows(program, opened, directory, step)
    stored = opened.parameter_names_by_path()
    for num_written, (path, names) in enumerate(stored.items()):
        progress(num_written, len(stored))
        rows = rows_by_path(path)
        for name, padded_row in zip(names, rows, strict=True):
            row = padded_row[tuple(map(slice, parameters[name]))]
            for written, tensor in published.add(name, row) if published else [(name, row)]:
                writer.write(written, values.cast(written, tensor, written_dtype))
    writer.close()
    values.report(directory)
    num_parameters = sum(math.prod(shape) for shape in parameters.values())
    return _write_config(model, destination, dtype), num_parameters, len(specs)


def _exported_rows(
    program: ResolvedProgram, opened: OpenedModel, directory: Path, step: int
) -> Callable[[str], np.ndarray]:
    """Return a function of a path that returns the rows of a parameter, adapters merged."""
    from graphtrain.checkpoints.arrays import restore_array

    def restore(path: str) -> np.ndarray:
        return restore_array(directory / "checkpoints", step, f"parameters/{path}")

    if program.adapter is not None:
        from graphtrain.weights.imported_merged import merged_reader

        return merged_reader(program, opened, directory, restore)

    def rows(path: str) -> np.ndarray:
        return block_rows(opened, path, restore(path), program.stages)

    return rows


def _write_config(model: TorchModel, destination: Path, dtype: str) -> str:
    """Write config.json, unless the model is a module of the user; return the model_type.

    With it go the files of the image processor, unless they are there already.
    """
    if model.hf is None:
        return str(model.torch)
    config: dict[str, Any] = read_config(model.hf, model.overrides)
    config.pop(QUANTIZATION_CONFIG, None)  # the written weights are not quantized
    if model.images:
        for path in (config_path(model.hf).parent / name for name in PROCESSOR_FILES):
            if path.is_file() and not (destination / path.name).exists():
                shutil.copyfile(path, destination / path.name)
    exported_config = config | {"dtype": dtype}
    (destination / "config.json").write_text(json.dumps(exported_config, indent=2) + "\n")
    return config["model_type"]
