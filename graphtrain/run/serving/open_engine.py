"""Open an engine: look up its programs, and load the weights of a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.pruned import read_checkpoint
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.config.serving_program import serving_program
from graphtrain.graphs.names import ServingPurpose, graphs_for
from graphtrain.run.agreement import check_same_executables, on_all_ranks
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.serving.device_model import first_prefill_name
from graphtrain.run.serving.engine import CompiledEngine
from graphtrain.run.serving.kept_weights import KeptWeights, kept_weights
from graphtrain.run.serving.weights import check_step, load_weights
from graphtrain.run.trained_tokenizer import check_trained_tokenizer
from lowering.trees import Tree

if TYPE_CHECKING:
    from graphtrain.weights.named_adapters import NamedAdapter


def open_engine(
    program: ResolvedProgram,
    run: Run,
    cache: Cache,
    *,
    step: int | None,
    compile_hint: str,
    vocab: int | None = None,
    purpose: ServingPurpose = "serve",
    adapters: Sequence[NamedAdapter] = (),
    merged: NamedAdapter | None = None,
) -> CompiledEngine:
    """Look up the programs, and load the weights of a run onto the devices.

    Args:
        program: The program that was trained.
        run: The run whose weights are used.
        cache: Cache of compiled programs.
        step: Step of the checkpoint; None for the last, or for run.init_from if there is none.
        compile_hint: What compiles missing programs, for the error message.
        vocab: Number of tokens of the tokenizer; others are not generated. None: all.
        purpose: Generate one sequence, a batch of many, evaluate tasks, or serve.
        adapters: LoRA adapters to serve beside the weights, as open_adapters returns them.
        merged: LoRA adapter to merge into the weights, as open_merged_adapter returns it.

    Raises:
        MissingProgram: a program is not compiled.
        TrainingError: there are no weights.
        DataError: the training data was prepared with another tokenizer since.
    """
    check_step(run, step)
    check_trained_tokenizer(run, step)
    served, names = graphs_for(program, purpose)
    graphs = on_all_ranks(lambda: LoadedPrograms(served, cache, names, compile_hint))
    check_same_executables(graphs)
    with lowering.backend(served.target).forbid_tracing():
        read, (weights, parameters, kept) = read_checkpoint(
            Path(run.directory) / "checkpoints",
            step,
            lambda step: _weights_or_parameters(program, run, served, graphs, step, merged),
        )
    name = run.init_from if read is None else f"{run.directory}/checkpoints/{read}"
    name = name if merged is None else f"{name} with adapter {merged.name!r}"
    return CompiledEngine(
        served,
        graphs,
        parameters,
        weights_name=str(name),
        vocab=vocab,
        adapters=adapters,
        weights=weights,
        kept=kept,
    )


def _weights_or_parameters(
    program: ResolvedProgram,
    run: Run,
    served: ResolvedProgram,
    graphs: LoadedPrograms,
    step: int | None,
    merged: NamedAdapter | None,
) -> tuple[Tree | None, Tree | None, KeptWeights | None]:
    """Return weights as served; else parameters to make them of, and where to keep them."""
    kept = kept_weights(program, run, step, graphs.keys["serve_init"].digest)
    if merged is not None or served.settings.serve.total_adapter_rank:
        kept = None  # the factors are among the weights
    if kept is not None:
        described = graphs.inputs(first_prefill_name(served), "weights")
        try:
            if (weights := kept.read(served, described)) is not None:
                return weights, None, None
        except DamagedCheckpoint as damaged:
            kept.remove()
            warnings.warn(f"{kept.folder}: {damaged.reason}; it is made again", stacklevel=2)
    described = graphs["serve_init"].inputs("parameters")
    return None, load_weights(program, run, served, described, step, merged), kept


def load_checkpoint(engine: CompiledEngine, program: ResolvedProgram, run: Run, step: int) -> None:
    """Replace the weights of an engine by those of another checkpoint of its run.

    Raises:
        TrainingError: the checkpoint is damaged, or was deleted.
    """
    served = serving_program(program)
    directory = Path(run.directory) / "checkpoints"
    engine.replace_weights(
        lambda described: read_checkpoint(
            directory, step, lambda step: load_weights(program, run, served, described, step)
        )[1],
        f"{directory}/{step}",
    )
