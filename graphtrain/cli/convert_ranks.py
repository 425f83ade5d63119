"""`graphtrain convert` for checkpoints by rank, of Megatron-LM, NeMo and MindSpore."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.conversion_output import (
    averaged_option,
    conversion_progress,
    print_summary,
    print_usage_hint,
)
from graphtrain.cli.options import LocalPath, RunPath, json_option, step_option

if TYPE_CHECKING:
    from graphtrain.checkpoints.steps import StepName

_DIRECTORY = LocalPath()
_tensor_option = click.option(
    "--tensor", type=click.IntRange(1), default=1, show_default=True, help="Tensor ranks."
)
_pipeline_option = click.option(
    "--pipeline", type=click.IntRange(1), default=1, show_default=True, help="Pipeline ranks."
)
_layers_option = click.option(
    "--layers",
    metavar="N,N,...",
    help="Layers of each pipeline rank, or of each chunk of a virtual pipeline, in the order of "
    "the model. [default: equally many]",
)
_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Data type of the written weights. [default: that of the initial weights; float32 for "
    "models trained from scratch]",
)


@click.command("megatron-to-graphtrain")
@click.argument("source", type=_DIRECTORY)
@click.argument("destination", type=_DIRECTORY)
@click.option(
    "--model",
    metavar="PRESET|FILE",
    help="Model of the checkpoint, if the checkpoint does not record it: the name of a preset, a "
    ".toml file with a [program.model] section, or the model_config.yaml or hparams.yaml of NeMo.",
)
@click.option(
    "--vocab",
    type=click.IntRange(1),
    help="Number of rows of the vocabulary to keep. [default: vocab_size of the checkpoint, or all "
    "rows if it records none]",
)
@json_option
def megatron_to_graphtrain(
    source: Path, destination: Path, model: str | None, vocab: int | None, as_json: bool
) -> None:
    """Convert SOURCE, a checkpoint of Megatron-LM or NeMo, to DESTINATION.

    SOURCE has the torch-dist format or a directory for each rank (mp_rank_XX, or
    tp_rank_XX_pp_rank_XXX of NeMo), with any degree of tensor, pipeline and expert parallelism. Of
    a directory with several checkpoints of Megatron-LM, the latest is converted; of NeMo, SOURCE
    is DIRECTORY/FILE.ckpt, without the directory of the rank. A run can start from DESTINATION
    (run.init_from).
    """
    from graphtrain.weights.megatron.convert import from_megatron

    with conversion_progress() as show:
        summary = from_megatron(source, destination, show, model, vocab)
    print_summary(summary, destination, as_json)
    print_usage_hint(destination, as_json)


@click.command("mindspore-to-graphtrain")
@click.argument("source", type=_DIRECTORY)
@click.argument("destination", type=_DIRECTORY)
@click.option(
    "--model",
    metavar="PRESET|FILE",
    help="Model of the checkpoint: the name of a preset, or a .toml file with a [program.model] "
    "section. [default: model.toml in SOURCE]",
)
@click.option(
    "--strategy",
    type=_DIRECTORY,
    metavar="FILE|DIRECTORY",
    help="Strategy file of MindSpore, or the directory of those of all ranks. [default: strategy "
    "in SOURCE, if there is one]",
)
@json_option
def mindspore_to_graphtrain(
    source: Path, destination: Path, model: str | None, strategy: Path | None, as_json: bool
) -> None:
    """Convert SOURCE, a checkpoint of MindSpore with MindFormers' names of Llama, to DESTINATION.

    SOURCE is a complete .ckpt file, or a directory with rank_N/NAME.ckpt. A run can start from
    DESTINATION (run.init_from).
    """
    from graphtrain.weights.mindspore.convert import from_mindspore

    with conversion_progress() as show:
        summary = from_mindspore(source, destination, show, model, strategy)
    print_summary(summary, destination, as_json)
    print_usage_hint(destination, as_json)


@click.command("graphtrain-to-megatron")
@click.argument("source", type=RunPath())
@click.argument("destination", type=_DIRECTORY)
@step_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["torch-dist", "ranks"]),
    default="torch-dist",
    show_default=True,
    help="File format: torch-dist, which megatron-core loads on any number of ranks, or a "
    "directory mp_rank_XX for each of these ranks.",
)
@_tensor_option
@_pipeline_option
@click.option(
    "--virtual",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Chunks of layers of each pipeline rank (virtual pipeline).",
)
@click.option(
    "--expert", type=click.IntRange(1), default=1, show_default=True, help="Expert ranks."
)
@_layers_option
@click.option(
    "--layer-names",
    type=click.Choice(["local", "transformer_engine"]),
    default="local",
    show_default=True,
    help="Layers of megatron-core whose names mp_rank_XX directories have (its "
    "--transformer-impl); torch-dist serves both.",
)
@click.option(
    "--vocab-multiple",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Pad the vocabulary to a multiple of this number times the tensor ranks, as Megatron-LM "
    "does (--make-vocab-size-divisible-by).",
)
@averaged_option
@_dtype_option
@json_option
def graphtrain_to_megatron(
    source: Path,
    destination: Path,
    step: StepName,
    kind: Any,
    tensor: int,
    pipeline: int,
    virtual: int,
    expert: int,
    layers: str | None,
    layer_names: Any,
    vocab_multiple: int,
    averaged: bool,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Convert SOURCE to DESTINATION, a checkpoint that Megatron-LM loads (--load).

    SOURCE is a run (its directory, project or configuration), or converted weights. A trained LoRA
    adapter is merged into the weights. Optimizer state is not written.
    """
    from graphtrain.checkpoints.pruned import read_checkpoint
    from graphtrain.checkpoints.steps import named_step
    from graphtrain.weights.megatron.export import MegatronForm, to_megatron
    from graphtrain.weights.megatron.layout import RankLayout

    layout = RankLayout(tensor, pipeline, expert, virtual, _layer_counts(layers))
    form = MegatronForm(kind, layout, layer_names, vocab_multiple, dtype)
    directory, chosen = source / "checkpoints", named_step(source / "checkpoints", step)
    with conversion_progress() as show:
        _, summary = read_checkpoint(
            directory,
            chosen,
            lambda step: to_megatron(source, destination, show, form, step, averaged=averaged),
        )
    print_summary(summary, destination, as_json)


@click.command("graphtrain-to-mindspore")
@click.argument("source", type=RunPath())
@click.argument("destination", type=_DIRECTORY)
@step_option
@_tensor_option
@_pipeline_option
@_layers_option
@averaged_option
@_dtype_option
@json_option
def graphtrain_to_mindspore(
    source: Path,
    destination: Path,
    step: StepName,
    tensor: int,
    pipeline: int,
    layers: str | None,
    averaged: bool,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Convert SOURCE to DESTINATION, .ckpt files of MindSpore with MindFormers' names of Llama.

    SOURCE is a run (its directory, project or configuration), or converted weights. DESTINATION
    has rank_N/checkpoint.ckpt for each rank and the strategy files. A trained LoRA adapter is
    merged into the weights. Optimizer state is not written.
    """
    from graphtrain.checkpoints.pruned import read_checkpoint
    from graphtrain.checkpoints.steps import named_step
    from graphtrain.weights.megatron.layout import RankLayout
    from graphtrain.weights.mindspore.export import to_mindspore

    layout = RankLayout(tensor, pipeline, layers=_layer_counts(layers))
    directory, chosen = source / "checkpoints", named_step(source / "checkpoints", step)
    with conversion_progress() as show:
        _, summary = read_checkpoint(
            directory,
            chosen,
            lambda step: to_mindspore(
                source, destination, show, layout, dtype, step, averaged=averaged
            ),
        )
    print_summary(summary, destination, as_json)


def _layer_counts(text: str | None) -> tuple[int, ...]:
    """Return the numbers of layers in --layers."""
    counts = [] if text is None else text.split(",")
    if not all(count.isascii() and count.isdigit() and len(count) < 6 for count in counts):
        raise click.UsageError(f"--layers {text}: write numbers with commas, for example 6,10,8")
    return tuple(int(count) for count in counts)
