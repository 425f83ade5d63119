"""`graphtrain convert`: weights from other formats and back, and runs to other layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.options import json_option

if TYPE_CHECKING:
    from graphtrain.weights.convert import Progress, Summary

_FOLDER = click.Path(path_type=Path)


@click.group("convert")
def command() -> None:
    """Bring weights from other formats and back."""


@command.command("hf-to-graphtrain")
@click.argument("source", type=_FOLDER)
@click.argument("destination", type=_FOLDER)
@json_option
def hf_to_graphtrain(source: Path, destination: Path, as_json: bool) -> None:
    """Make DESTINATION, which a run can start from, of SOURCE, a folder of Hugging Face.

    SOURCE holds config.json and weights as .safetensors or .bin, in one file or in several with an
    index.
    """
    from graphtrain.weights.convert import from_hugging_face

    with _progress() as show:
        summary = from_hugging_face(source, destination, show)
    _tell(summary, destination, as_json)
    _tell_use(destination, as_json)


@command.command("megatron-to-graphtrain")
@click.argument("source", type=_FOLDER)
@click.argument("destination", type=_FOLDER)
@click.option(
    "--model",
    metavar="PRESET|FILE",
    help="What model it is, where the checkpoint does not say: a preset's name, or a .toml file "
    "with a [program.model].",
)
@click.option(
    "--vocab",
    type=click.IntRange(1),
    help="Rows of the vocabulary to keep; the checkpoint's own vocab_size if left out, else all.",
)
@json_option
def megatron_to_graphtrain(
    source: Path, destination: Path, model: str | None, vocab: int | None, as_json: bool
) -> None:
    """Make DESTINATION, which a run can start from, of SOURCE, a checkpoint of Megatron-LM.

    SOURCE is in the layout torch-dist or of folders mp_rank_XX, of any degrees of tensor, pipeline
    and expert parallelism; or a folder of several, of which the latest is taken.
    """
    from graphtrain.weights.megatron.convert import from_megatron

    with _progress() as show:
        summary = from_megatron(source, destination, show, model, vocab)
    _tell(summary, destination, as_json)
    _tell_use(destination, as_json)


@command.command("graphtrain-to-hf")
@click.argument("source", type=_FOLDER)
@click.argument("destination", type=_FOLDER)
@click.option("--step", type=click.IntRange(0), help="Of a run's checkpoint; the last one.")
@click.option("--adapter", is_flag=True, help="Only the adapter that a run trained, for peft.")
@json_option
def graphtrain_to_hf(
    source: Path, destination: Path, step: int | None, adapter: bool, as_json: bool
) -> None:
    """Make DESTINATION, which transformers loads, of SOURCE: a run's directory or a converted one.

    Configuration, tokenizer and chat template are those that the weights began with. An adapter
    that the run trained is merged into them; --adapter writes it alone, as peft loads it.
    """
    if adapter:
        from graphtrain.weights.peft import to_peft_folder

        _tell(to_peft_folder(source, destination, step), destination, as_json)
        return
    from graphtrain.weights.convert import to_hugging_face_folder

    with _progress() as show:
        summary = to_hugging_face_folder(source, destination, show, step)
    _tell(summary, destination, as_json)


@command.command("reshard")
@click.argument("source", type=_FOLDER)
@click.argument("destination", type=_FOLDER)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    required=True,
    metavar="CONFIG|STRATEGY",
    help="The program to make it for: a configuration, or what graphtrain plan --save-strategy "
    "wrote (.json).",
)
@click.option("--step", type=click.IntRange(0), help="Of the checkpoint; the last one.")
@json_option
def reshard(source: Path, destination: Path, to: Path, step: int | None, as_json: bool) -> None:
    """Make DESTINATION, a run to go on from, of SOURCE, a run of another mesh or pipeline.

    A run does this by itself when it loads; here it is done once, and on no device.
    """
    import jax

    from graphtrain.checkpoints.reshard import reshard as make

    jax.config.update("jax_platforms", "cpu")  # Orbax would take an accelerator
    with _progress() as show:
        summary = make(source, destination, to, show, step)
    if as_json:
        _tell_json(summary, destination)
        return
    click.echo(
        f"{destination}: step {summary.step}, {summary.arrays} arrays, {summary.bytes:,} bytes; "
        f"{summary.moved} with layers in other rows"
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as display:
        row = display.add_task("arrays", total=None)
        yield lambda done, count: display.update(row, completed=done, total=count)


def _tell_use(destination: Path, as_json: bool) -> None:
    if not as_json:
        click.echo(
            f'in a configuration: [program.model] preset = "{destination}/model.toml" and '
            f'[run] initial = "{destination}"'
        )


def _tell(summary: Summary, destination: Path, as_json: bool) -> None:
    if as_json:
        _tell_json(summary, destination)
        return
    click.echo(
        f"{destination}: {summary.family}, {summary.parameters:,} parameters in {summary.arrays} "
        f"arrays, {summary.dtype}"
    )


def _tell_json(summary: Any, destination: Path) -> None:
    from dataclasses import asdict

    click.echo(json.dumps(asdict(summary) | {"folder": str(destination)}))
