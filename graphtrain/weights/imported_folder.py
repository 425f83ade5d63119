"""Weights of an imported model in a Hugging Face folder.

Reading imports no PyTorch: the tensors that form the rows of a stacked array are recognised by
their names, which differ in the layer index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.weights.expert_files import Index, ModuleFiles
from graphtrain.weights.files import first_names
from graphtrain.weights.finite import count_not_finite, require_finite
from graphtrain.weights.layer_row_names import rows_of
from graphtrain.weights.padded_parts import is_stored_unpadded, padded_part, zeros_of
from graphtrain.weights.quantized_files import open_hugging_face
from graphtrain.weights.stacked_orders import layer_count, stacked_orders
from graphtrain.weights.torch_modules import meta_module_of, stored_buffers
from lowering.machine.extras import optional_import
from lowering.trees import Tree, flatten

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel
    from graphtrain.torch_frontend.meta_module import MetaModule
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
        module = meta_module_of(model)
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
        operations = meta_module_of(self._model).initializers.get(name, ())
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


def _refuse(names: list[str], directory: Path) -> None:
    """Refuse a folder with tensors that nothing reads.

    Raises:
        WeightsError: there are such tensors.
    """
    if names:
        raise WeightsError(
            f"run.init_from: {directory} contains {first_names(sorted(names))}, which the model "
            "does not read, so that its results would differ; check that program.model.hf and "
            "its overrides are those of this folder"
        )


def _in_layer_order(names: list[str], shape: tuple[int, ...], order: LayerRows) -> np.ndarray:
    """Arrange names in the run's order of layer rows; None for padding rows."""
    ordered = [None if row is None else names[row] for row in order]
    return np.array(ordered, object).reshape(shape)
