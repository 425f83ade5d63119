"""`graphtrain convert`: convert weights from and to other formats; reshard checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.options import LocalPath, RunPath, json_option, step_option
from graphtrain.cli.usage import Group

if TYPE_CHECKING:
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.weights.convert import ConversionSummary, Progress

_DIRECTORY = LocalPath()


@click.group("convert", cls=Group)
def command() -> None:
    """Convert weights from and to other formats; reshard checkpoints."""


@command.command("hf-to-graphtrain")
@click.argument("source", type=_DIRECTORY)
@click.argument("destination", type=_DIRECTORY)
@json_option
def hf_to_graphtrain(source: Path, destination: Path, as_json: bool) -> None:
    """Convert SOURCE, a Hugging Face model directory, to DESTINATION.

    SOURCE contains config.json and the weights as .safetensors or .bin, in one file or in several
    with an index. A run can start from DESTINATION (run.init_from).
    """
    from graphtrain.weights.convert import import_hugging_face

    with _progress() as show:
        summary = import_hugging_face(source, destination, show)
    _print_summary(summary, destination, as_json)
    _print_usage_hint(destination, as_json)


@command.command("megatron-to-graphtrain")
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

    with _progress() as show:
        summary = from_megatron(source, destination, show, model, vocab)
    _print_summary(summary, destination, as_json)
    _print_usage_hint(destination, as_json)


@command.command("graphtrain-to-hf")
@click.argument("source", type=RunPath())
@click.argument("destination", type=_DIRECTORY)
@step_option
@click.option(
    "--adapter", is_flag=True, help="Write only the trained LoRA adapter, in the format of PEFT."
)
@click.option(
    "--averaged",
    is_flag=True,
    help="Write the moving average of the weights (program.optimizer.ema_decay).",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Data type of the written weights. [default: that of the initial weights; float32 for "
    "PyTorch models and models trained from scratch]",
)
@click.option(
    "--max-file-size",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="GB",
    help="Maximum size of a file of weights in 10^9 bytes; with more, there are several and an "
    "index.",
)
@json_option
def graphtrain_to_hf(
    source: Path,
    destination: Path,
    step: StepName,
    adapter: bool,
    averaged: bool,
    dtype: str | None,
    max_file_size: float,
    as_json: bool,
) -> None:
    """Convert SOURCE to DESTINATION, a Hugging Face model directory.

    SOURCE is a run (its directory, project or configuration), or converted weights. Configuration,
    tokenizer and chat template are those of the initial weights. A trained LoRA adapter is merged
    into the weights; with --adapter it is written alone, in the format of PEFT.
    """
    from graphtrain.checkpoints.pruned import read_checkpoint
    from graphtrain.checkpoints.steps import named_step
    from graphtrain.weights.convert import ExportedFiles, export_hugging_face
    from graphtrain.weights.peft import export_peft

    directory, chosen = source / "checkpoints", named_step(source / "checkpoints", step)
    if adapter:
        if averaged:
            raise click.UsageError("--adapter and --averaged exclude each other")
        if dtype is not None:
            raise click.UsageError("--adapter writes the dtype of the run; remove --dtype")
        _, summary = read_checkpoint(
            directory, chosen, lambda step: export_peft(source, destination, step)
        )
    else:
        files = ExportedFiles(dtype, int(max_file_size * 1e9))
        with _progress() as show:
            _, summary = read_checkpoint(
                directory,
                chosen,
                lambda step: export_hugging_face(
                    source, destination, show, step, averaged=averaged, files=files
                ),
            )
    _print_summary(summary, destination, as_json)


@command.command("graphtrain-to-megatron")
@click.argument("source", type=RunPath())
@click.argument("destination", type=_DIRECTORY)
@step_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["torch-dist", "ranks"]),
    default="torch-dist",
    show_default=True,
    help="File format: torch-dist, which megatron-core loads on any number of ranks, or a directory "
    "mp_rank_XX for each of these ranks.",
)
@click.option(
    "--tensor", type=click.IntRange(1), default=1, show_default=True, help="Tensor ranks."
)
@click.option(
    "--pipeline", type=click.IntRange(1), default=1, show_default=True, help="Pipeline ranks."
)
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
@click.option(
    "--layers",
    metavar="N,N,...",
    help="Layers of each pipeline rank, or chunk, in the order of the model. [default: equally "
    "many]",
)
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
@click.option(
    "--averaged",
    is_flag=True,
    help="Write the moving average of the weights (program.optimizer.ema_decay).",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Data type of the written weights. [default: that of the initial weights; float32 for "
    "models trained from scratch]",
)
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
    with _progress() as show:
        _, summary = read_checkpoint(
            directory,
            chosen,
            lambda step: to_megatron(source, destination, show, form, step, averaged=averaged),
        )
    _print_summary(summary, destination, as_json)


def _layer_counts(text: str | None) -> tuple[int, ...]:
    """Return the numbers of layers in --layers."""
    counts = [] if text is None else text.split(",")
    if not all(count.isascii() and count.isdigit() and len(count) < 6 for count in counts):
        raise click.UsageError(f"--layers {text}: write numbers with commas, for example 6,10,8")
    return tuple(int(count) for count in counts)


@command.command("reshard")
@click.argument("source", type=RunPath())
@click.argument("destination", type=_DIRECTORY)
@click.option(
    "--to",
    type=LocalPath(),
    required=True,
    metavar="CONFIG|STRATEGY",
    help="Configuration of the new run, or the strategy (.json) that graphtrain plan "
    "--save-strategy wrote.",
)
@step_option
@click.option(
    "--averaged",
    is_flag=True,
    help="Take the moving average of the weights (program.optimizer.ema_decay) as the weights.",
)
@json_option
def reshard(
    source: Path, destination: Path, to: Path, step: StepName, averaged: bool, as_json: bool
) -> None:
    """Convert a checkpoint of the run SOURCE to another mesh or pipeline, as the run DESTINATION.

    graphtrain run does the same each time that it loads a checkpoint of another mesh; this command
    does it once, on the CPU.
    """
    import jax

    from graphtrain.checkpoints.pruned import read_checkpoint
    from graphtrain.checkpoints.reshard import reshard as make
    from graphtrain.checkpoints.steps import named_step

    jax.config.update("jax_platforms", "cpu")  # Orbax would initialize an accelerator
    chosen = named_step(source / "checkpoints", step)
    with _progress() as show:
        _, summary = read_checkpoint(
            source / "checkpoints",
            chosen,
            lambda step: make(source, destination, to, show, step, averaged=averaged),
        )
    if as_json:
        _print_summary_json(summary, destination)
        return
    order = f"; layers in another order in {summary.reordered} arrays" if summary.reordered else ""
    click.echo(
        f"{destination}: step {summary.step}, {summary.arrays} arrays, {summary.bytes:,} bytes"
        f"{order}"
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a progress bar on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as display:
        row = display.add_task("arrays", total=None)
        yield lambda completed, count: display.update(row, completed=completed, total=count)


def _print_usage_hint(destination: Path, as_json: bool) -> None:
    if not as_json:
        click.echo(
            f"to use it, set in a configuration: [program.model] preset = "
            f'"{destination}/model.toml" and [run] init_from = "{destination}"'
        )


def _print_summary(summary: ConversionSummary, destination: Path, as_json: bool) -> None:
    if as_json:
        _print_summary_json(summary, destination)
        return
    click.echo(
        f"{destination}: {summary.family}, {summary.parameters:,} parameters in {summary.arrays} "
        f"arrays, {summary.dtype}"
    )


def _print_summary_json(summary: Any, destination: Path) -> None:
    from dataclasses import asdict

    click.echo(json.dumps(asdict(summary) | {"folder": str(destination)}))
