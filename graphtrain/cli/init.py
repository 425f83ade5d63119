"""`graphtrain init`: prepare data and write a configuration file for it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.options import LocalPath
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.config import Config


@click.command("init")
@click.argument("directory", type=LocalPath())
@click.option(
    "--like",
    default="llama",
    show_default=True,
    metavar="KIND",
    help="Kind of model: llama, gpt2 (can be exported to Hugging Face), shakespeare-char "
    "(nanoGPT's character model), lora=FOLDER (a LoRA adapter for a Hugging Face model) or "
    "hf=FOLDER (the architecture of a Hugging Face model, from new weights).",
)
@click.option(
    "--data",
    multiple=True,
    type=LocalPath(),
    metavar="FILE",
    help="File of text: .txt, .jsonl or another that `graphtrain data prepare` reads. May be "
    "repeated. [default: a sample that is part of Python]",
)
@click.option(
    "--tokenizer",
    help="Tokenizer, as in `graphtrain data prepare`. [default: by the kind of model and the size "
    "of the text]",
)
def command(directory: Path, like: str, data: tuple[Path, ...], tokenizer: str | None) -> None:
    """Start a project in DIRECTORY: prepare data, and write a short config.toml for it.

    The sizes of the model, the batch and the tokenizer follow from the amount of text. Nothing that
    exists is replaced.
    """
    from graphtrain.api.starters.project import create_project
    from graphtrain.cli.data_output import describe_documents, progress

    with progress() as report:
        project = create_project(directory, like, data, tokenizer, report)
    for name in ("train", "validation"):
        if (split := getattr(project.data, name)) is not None:
            say(f"{directory / 'data' / name}: {describe_documents(split)}")
    say(f"{project.config_path}: {_description(project.config)}")
    say(f"next: {shlex.join(['graphtrain', 'run', str(directory), '--compile'])}")


def _description(config: Config) -> str:
    """Return the size of a model and of its training."""
    from graphtrain.config.schema import TorchModel
    from graphtrain.models.flops import parameter_count

    model, steps = config.program.model, config.run.steps
    size = (
        f"the model of {model.hf}"
        if isinstance(model, TorchModel)
        else f"{parameter_count(model):,} parameters"
    )
    return f"{size}, {steps} steps of {config.program.batch.tokens:,} tokens"
