"""`graphtrain data`: make a sample corpus, prepare text for training, look into a dataset."""

import json
import sys
from pathlib import Path

import click


@click.group("data")
def command() -> None:
    """Make a sample corpus; prepare text for training."""


@command.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--megabytes", type=click.FloatRange(min=0), default=8.0, show_default=True)
def sample(output: Path, megabytes: float) -> None:
    """Write a corpus of real text that every Python carries, without a network."""
    from graphtrain.data.sample import write_sample

    written = write_sample(output, limit=int(megabytes * 1e6))
    click.echo(
        f"{output}: {written.documents} documents, {written.text_bytes / 1e6:.1f} MB", err=True
    )


@command.command()
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="a directory")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    help="bytes, sentencepiece:VOCAB to learn one, or FILE.model",
)
@click.option("--key", default="text", show_default=True, help="of the text in each JSON object")
@click.option("--eod/--no-eod", default=True, help="end each document with the tokenizer's mark")
@click.option(
    "--validation", default=0.05, show_default=True, help="fraction of the documents; 0 for none"
)
@click.option("--seed", default=0, show_default=True, help="chooses the validation documents")
@click.option("--workers", type=click.IntRange(min=1), help="processes; left out: as many as pay")
def prepare(
    inputs: tuple[Path, ...],
    output: Path,
    tokenizer: str,
    key: str,
    eod: bool,
    validation: float,
    seed: int,
    workers: int | None,
) -> None:
    """Make train and validation datasets from files of JSON lines (.gz is unpacked)."""
    from rich.console import Console
    from rich.progress import Progress

    from graphtrain.data.prepare import prepare as prepare_data

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=1.0)
        made = prepare_data(
            inputs,
            output,
            tokenizer,
            key=key,
            append_eod=eod,
            validation=validation,
            seed=seed,
            workers=workers,
            report=lambda stage, done: progress.update(task, description=stage, completed=done),
        )
    if made.up_to_date:
        click.echo(f"{output}: up to date, nothing to do", err=True)
    for name, split in (("train", made.train), ("validation", made.validation)):
        if split is not None:
            click.echo(
                f"{output / name}: {split.documents} documents, {split.tokens} tokens, "
                f"vocabulary of {split.vocab}",
                err=True,
            )


@command.command()
@click.argument("prefix")
@click.option("--json", "as_json", is_flag=True, help="for programs")
def inspect(prefix: str, as_json: bool) -> None:
    """Say what a dataset holds. PREFIX is its name without .bin and .idx."""
    from graphtrain.data.description import summary

    facts = summary(prefix)
    if as_json:
        json.dump(facts, sys.stdout)
        click.echo()
        return
    for name, value in facts.items():
        click.echo(f"{name}: {value}")
