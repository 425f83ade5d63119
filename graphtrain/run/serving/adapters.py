"""LoRA adapters beside or in the weights of a run: opened and checked, then loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

import lowering
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run, is_imported
from graphtrain.config.serving_program import serving_program
from graphtrain.errors import WeightsError
from graphtrain.run.serving.weights import check_step
from graphtrain.weights.imported_folder import HuggingFaceWeights
from graphtrain.weights.initial import Index, open_initial_weights
from graphtrain.weights.named_adapters import (
    NamedAdapter,
    ServedBase,
    check_adapters,
    joined_factors,
    read_adapter,
)
from graphtrain.weights.open import open_weights
from graphtrain.weights.sources import HF_FILES, WeightSource
from lowering.trees import Tree


def open_adapters(
    trained: ResolvedProgram,
    run: Run,
    step: int | None,
    directories: Mapping[str, Path],
    remedy: str,
    log: Callable[[str], None],
) -> list[NamedAdapter]:
    """Read adapters, and check them against the program and the weights that are served.

    Args:
        trained: The program that was trained.
        run: The run whose weights are served.
        step: Step of the checkpoint; None for the last, or for run.init_from if there is none.
        directories: Folders of PEFT, or directories of runs, by the name of the adapter.
        remedy: Command that compiles the programs, for the error message.
        log: Called with what is doubtful about them.

    Raises:
        WeightsError: an adapter cannot be served; the message names it, and what to do.
    """
    if not directories:
        return []
    adapters = _read_adapters(trained, run, step, directories, log)
    check_adapters(adapters, serving_program(trained).settings, remedy)
    return adapters


def open_merged_adapter(
    trained: ResolvedProgram,
    run: Run,
    step: int | None,
    name: str,
    directory: Path,
    log: Callable[[str], None],
) -> NamedAdapter:
    """Read an adapter that `load_weights` merges into the weights of a run.

    Args:
        trained: The program that was trained.
        run: The run.
        step: Step of the checkpoint; None for the last, or for run.init_from if there is none.
        name: Name of the adapter, for messages.
        directory: Folder of PEFT, or directory of a run.
        log: Called with what is doubtful about it.

    Raises:
        WeightsError: it cannot be merged; the message says why.
    """
    (adapter,) = _read_adapters(trained, run, step, {name: directory}, log)
    return adapter


def _read_adapters(
    trained: ResolvedProgram,
    run: Run,
    step: int | None,
    directories: Mapping[str, Path],
    log: Callable[[str], None],
) -> list[NamedAdapter]:
    if is_imported(trained.model):
        raise WeightsError(
            "adapters need the native decoder, not model.hf, model.torch or model.flax; "
            "convert the weights (graphtrain convert hf-to-graphtrain)"
        )
    base = _served_base(trained, run, step)
    adapters = [read_adapter(name, folder, base) for name, folder in directories.items()]
    for adapter in adapters:
        if adapter.base_dtype not in (None, base.base_dtype):
            log(
                f"adapter {adapter.name!r} was trained on base weights in {adapter.base_dtype}; it "
                f"is used with base weights in {base.base_dtype}, which are not quite the same"
            )
    return adapters


def load_adapters(
    adapters: Sequence[NamedAdapter], program: ResolvedProgram, described: Tree
) -> Tree:
    """Load the factors of adapters onto the devices, as serve_init takes them."""
    arrays = joined_factors(adapters, program.settings)

    def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        return arrays[path][index]

    return lowering.backend(program.target).from_shards(described, read)


def _served_base(trained: ResolvedProgram, run: Run, step: int | None) -> ServedBase:
    directory, model = Path(run.directory), trained.model
    steps = saved_steps(directory / "checkpoints")
    is_trained = step is not None or bool(steps)
    side = directory / HF_FILES
    if not is_trained and run.init_from is not None:
        side = Path(run.init_from) / HF_FILES
    adapter = trained.adapter
    quantized = None if is_trained or adapter is None else adapter.base_dtype

    def open_base() -> WeightSource:
        if is_trained:
            return open_weights(directory, step)
        check_step(run, step)
        weights = open_initial_weights(model, run)
        assert weights is not None and not isinstance(weights, HuggingFaceWeights)
        return weights

    return ServedBase(model, side, open_base, quantized or "float32")
