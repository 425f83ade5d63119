"""Parameters of a run of an imported model with its adapter merged, for export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from graphtrain.models.lora.quantize import fake_quantize
from graphtrain.models.lora.trainable import CODES, LORA_A, LORA_B
from graphtrain.weights.base import recorded_folder, verify_base
from graphtrain.weights.imported_folder import HuggingFaceWeights
from graphtrain.weights.stacked_orders import block_rows

if TYPE_CHECKING:
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.torch_frontend.model import OpenedModel


def merged_reader(
    program: ResolvedProgram,
    opened: OpenedModel,
    directory: Path,
    restore: Callable[[str], np.ndarray],
) -> Callable[[str], np.ndarray]:
    """Return a function that returns the rows of a parameter, in order, by its path.

    They are the (rounded or quantized) base weights plus the LoRA products.

    Args:
        program: Program of the run.
        opened: Its model.
        directory: Directory of the run.
        restore: Returns a trained array of the checkpoint by path.

    Raises:
        WeightsError: the base weights are not those of the run.
    """
    from graphtrain.torch_frontend.adapters import (
        frozen_arrays,
        fully_trained_paths,
        lora_orders,
    )

    adapter, model = program.adapter, program.model
    assert adapter is not None
    base = HuggingFaceWeights(recorded_folder(directory), model)  # pyright: ignore[reportArgumentType]
    verify_base(base, directory)
    shapes = {path: spec.shape for path, spec in opened.specs().items()}
    read, orders = base.part_reader(shapes), lora_orders(opened, adapter)
    saved, frozen = fully_trained_paths(opened, adapter), frozen_arrays(opened, program)

    def rows(path: str, stored: str) -> np.ndarray:
        return block_rows(opened, path, restore(stored), program.stages)

    def merged(path: str) -> np.ndarray:
        if path in saved:
            return rows(path, path)
        array = read(path, shapes[path], tuple(map(slice, shapes[path]))).astype(np.float32)
        if f"{path}/{CODES}" in frozen:
            kind: Any = adapter.base_dtype
            array = fake_quantize(array, kind)
        elif frozen[path].dtype == "bfloat16":
            array = array.astype(ml_dtypes.bfloat16).astype(np.float32)
        array = array if opened.is_stacked(path) else array[None]
        if path not in orders:
            return array
        order, e = orders[path], "e" if "e" in orders[path] else ""
        a, b = (rows(path, f"{path}/{name}") for name in (LORA_A, LORA_B))
        product = np.einsum(f"l{e}or,l{e}ri->l{order}", b, a, optimize=True)
        return array + np.float32(adapter.scale) * product

    return merged
