"""Weights of a run for an engine: of a checkpoint, or those that training would start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lowering
from graphtrain.checkpoints.checkpoint import restore_parameters
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.steps import missing_checkpoint, saved_steps
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.errors import TrainingError
from lowering.trees import Tree

if TYPE_CHECKING:
    from graphtrain.weights.named_adapters import NamedAdapter


def check_step(run: Run, step: int | None) -> None:
    """Check that there is a checkpoint to read, or run.init_from instead of the last one.

    Raises:
        TrainingError: there is neither, or the run would start from an adapter.
    """
    directory = Path(run.directory) / "checkpoints"
    steps = saved_steps(directory)
    if step in steps or (steps and step is None):
        return
    if step is not None or run.init_from is None:
        raise missing_checkpoint(directory, steps)
    if run.init_adapter_from is not None:
        raise TrainingError(
            f"no checkpoint in {directory}, and generate does not read run.init_adapter_from; "
            "remove "
            "it to generate with run.init_from alone, or train first (graphtrain run)"
        )


def load_weights(
    trained: ResolvedProgram,
    run: Run,
    program: ResolvedProgram,
    described: Tree,
    step: int | None,
    merged: NamedAdapter | None = None,
) -> Any:
    """Return the weights of a checkpoint; if `step` is None, those of run.init_from.

    Args:
        trained: The program that was trained.
        run: The run.
        program: The program that generates.
        described: Shapes, dtypes and shardings of its parameters.
        step: Step of the checkpoint.
        merged: LoRA adapter that is merged into them, besides that of the run.
    """
    fill = lowering.backend(program.target).from_shards
    directory, adapter = Path(run.directory), trained.adapter
    if step is not None and adapter is None and merged is None:
        layer_order = layer_order_of(program)
        return restore_parameters(
            directory / "checkpoints", step, described, layer_order, trained.settings
        )
    from graphtrain.weights.imported_folder import HuggingFaceWeights
    from graphtrain.weights.initial import load_initial_parameters, open_initial_weights
    from graphtrain.weights.open import open_weights

    if step is None:
        weights = open_initial_weights(trained.model, run)
    else:
        weights = open_weights(directory, step)
    if step is None and adapter is not None:
        from graphtrain.weights.merged import QuantizedBase

        assert weights is not None and not isinstance(weights, HuggingFaceWeights)
        weights = QuantizedBase(weights, adapter)
    assert weights is not None
    if merged is not None:
        from graphtrain.weights.merged import AdaptedWeights

        assert not isinstance(weights, HuggingFaceWeights)
        weights = AdaptedWeights(weights, merged.factors)
    return load_initial_parameters(weights, program, described, fill)
