"""Export of an imported model's weights to a folder that transformers can load."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.config.hf_config import config_path, read_config
from graphtrain.config.hf_images import PROCESSOR_FILES
from graphtrain.config.hf_quantization import QUANTIZATION_CONFIG
from graphtrain.weights.files import numpy_dtype_of
from graphtrain.weights.finite import ExportedValues
from graphtrain.weights.stacked_orders import block_rows
from graphtrain.weights.torch_modules import stored_buffers, unpadded_module
from graphtrain.weights.writer import MAX_FILE_BYTES, SafetensorsWriter
from lowering.machine.target import Target

if TYPE_CHECKING:
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import TorchModel
    from graphtrain.torch_frontend.meta_module import MetaModule
    from graphtrain.torch_frontend.model import OpenedModel


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
    parameters = {name: tuple(one.shape) for name, one in module.parameters().items()}
    saved, written_dtype = _SavedForm(model, module, parameters), numpy_dtype_of("--dtype", dtype)
    specs = {name: (written_dtype, shape) for name, shape in saved.shapes.items()}
    specs |= {name: (array.dtype, array.shape) for name, array in saved.constants.items()}
    writer = SafetensorsWriter(destination, specs, max_file_bytes)
    for name, array in saved.constants.items():
        writer.write(name, array)
    values = ExportedValues()
    rows_by_path = _exported_rows(program, opened, directory, step)
    stored = opened.parameter_names_by_path()
    for num_written, (path, names) in enumerate(stored.items()):
        progress(num_written, len(stored))
        for name, padded_row in zip(names, rows_by_path(path), strict=True):
            row = padded_row[tuple(map(slice, parameters[name]))]
            for written, tensor in saved.add(name, row):
                writer.write(written, values.cast(written, tensor, written_dtype))
    writer.close()
    values.report(directory)
    num_parameters = sum(math.prod(shape) for shape in parameters.values())
    return _write_config(model, destination, dtype), num_parameters, len(specs)


class _SavedForm:
    """Tensors as a folder has them: those of the module, or as transformers saves its models."""

    def __init__(
        self, model: TorchModel, module: MetaModule, parameters: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Compute the shapes of the tensors to write, and the values of those that are constants.

        Args:
            model: Settings of the model.
            module: Its module without weights, and without rows that pad the vocabulary.
            parameters: Shapes of the module's parameters.
        """
        buffers = stored_buffers(module)
        self._published = None
        if model.hf is not None:
            from graphtrain.weights.published import SavedTensors

            shapes = {name: buffer.shape for name, buffer in buffers.items()}
            self._published = SavedTensors(module.module, {**parameters, **shapes})
        self.constants: dict[str, np.ndarray] = {}  # they keep their dtype
        for name, buffer in buffers.items():
            self.constants |= dict(self.add(name, buffer))
        self.shapes = self._published.shapes if self._published else parameters

    def add(self, name: str, array: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        """Return names and values of the tensors that become complete with one of the module."""
        return self._published.add(name, array) if self._published else [(name, array)]


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
