"""`graphtrain convert`: convert weights from and to other formats; reshard checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.conversion_output import (
    averaged_option,
    conversion_progress,
    print_summary,
    print_summary_json,
    print_usage_hint,
)
from graphtrain.cli.convert_ranks import (
    graphtrain_to_megatron,
    graphtrain_to_mindspore,
    megatron_to_graphtrain,
    mindspore_to_graphtrain,
)
from graphtrain.cli.options import LocalPath, RunPath, json_option, step_option
from graphtrain.cli.usage import Group

if TYPE_CHECKING:
    from graphtrain.checkpoints.steps import StepName

_DIRECTORY = LocalPath()


@click.group("convert", cls=Group)
def command() -> None:
    """Convert weights from and to other formats; reshard checkpoints."""


for _command in (
    megatron_to_graphtrain,
    graphtrain_to_megatron,
    mindspore_to_graphtrain,
    graphtrain_to_mindspore,
):
    command.add_command(_command)


@command.command("hf-to-graphtrain")
@click.argument("source", type=_DIRECTORY)
@click.argument("destination", type=_DIRECTORY)
@json_option
def hf_to_graphtrain(source: Path, destination: Path, as_json: bool) -> None:
    """Convert SOURCE, a Hugging Face model directory, to DESTINATION.

    SOURCE contains config.json and the weights as .safetensors or .bin, in one file or in several
    with an index. A run can start from DESTINATION (run.init_from).
    """
    from graphtrain.weights.hf_import import import_hugging_face

    with conversion_progress() as show:
        summary = import_hugging_face(source, destination, show)
    print_summary(summary, destination, as_json)
    print_usage_hint(destination, as_json)


@command.command("graphtrain-to-hf")
@click.argument("source", type=RunPath())
@click.argument("destination", type=_DIRECTORY)
@step_option
@click.option(
    "--adapter", is_flag=True, help="Write only the trained LoRA adapter, in the format of PEFT."
)
@averaged_option
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
    from graphtrain.weights.hf_export import ExportedFiles, export_hugging_face
    from graphtrain.weights.peft_export import export_peft

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
        with conversion_progress() as show:
            _, summary = read_checkpoint(
                directory,
                chosen,
                lambda step: export_hugging_face(
                    source, destination, show, step, averaged=averaged, files=files
                ),
            )
    print_summary(summary, destination, as_json)


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
    with conversion_progress() as show:
        _, summary = read_checkpoint(
            source / "checkpoints",
            chosen,
            lambda step: make(source, destination, to, show, step, averaged=averaged),
        )
    if as_json:
        print_summary_json(summary, destination)
        return
    order = f"; layers in another order in {summary.reordered} arrays" if summary.reordered else ""
    click.echo(
        f"{destination}: step {summary.step}, {summary.arrays} arrays, {summary.bytes:,} bytes"
        f"{order}"
    )
