"""`graphtrain data`: make a corpus or a tokenizer, prepare text, look into and join datasets."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

_PATH = click.Path(path_type=Path)
_FRACTION = click.FloatRange(0, 1, max_open=True)


@click.group("data")
def command() -> None:
    """Make a sample corpus; prepare text for training."""


def _corpus_options(function: Callable[..., None]) -> Callable[..., None]:
    """What says which text of which files is read."""
    options = [
        click.argument("inputs", nargs=-1, required=True, type=_PATH),
        click.option(
            "--key",
            "keys",
            multiple=True,
            default=("text",),
            show_default=True,
            help="of the text in a JSON object or a table; several are joined by a blank line",
        ),
        click.option(
            "--clean",
            multiple=True,
            metavar="MODULE:FUNCTION",
            help="given a text, returns what to keep of it, or None; may be repeated",
        ),
        click.option(
            "--text-document",
            type=click.Choice(["line", "paragraph", "file"]),
            default="paragraph",
            show_default=True,
            help="what of a .txt file is a document",
        ),
        click.option(
            "--validation",
            type=_FRACTION,
            default=0.05,
            show_default=True,
            help="fraction of the documents; 0 for none",
        ),
        click.option(
            "--test",
            type=_FRACTION,
            default=0.0,
            show_default=True,
            help="fraction of the documents",
        ),
        click.option("--seed", default=0, show_default=True, help="chooses the held out documents"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@command.command()
@click.argument("output", type=_PATH)
@click.option("--megabytes", type=click.FloatRange(min=0), default=8.0, show_default=True)
def sample(output: Path, megabytes: float) -> None:
    """Write a corpus of real text that every Python carries, without a network."""
    from graphtrain.data.sample import write_sample

    written = write_sample(output, limit=int(megabytes * 1e6))
    click.echo(
        f"{output}: {written.documents} documents, {written.text_bytes / 1e6:.1f} MB", err=True
    )


@command.command()
@_corpus_options
@click.option("--output", required=True, type=_PATH, help="a directory")
@click.option("--kind", type=click.Choice(["sentencepiece", "bpe"]), default="sentencepiece")
@click.option("--vocab", type=click.IntRange(min=1), required=True, help="number of tokens")
@click.option("--special", multiple=True, help="a token that is never cut; may be repeated")
def tokenizer(output: Path, kind: str, vocab: int, special: tuple[str, ...], **corpus: Any) -> None:
    """Learn a tokenizer: sentencepiece's tokenizer.model, or bpe, GPT-2's way, tokenizer.json.

    It learns from the documents that `prepare`, given the same options, trains on.
    """
    from graphtrain.data.learn import learn_tokenizer

    inputs = corpus.pop("inputs")
    with _progress() as report:
        made = learn_tokenizer(
            inputs, output, kind, vocab, special=special, report=report, **corpus
        )
    click.echo(f"{made.path}: vocabulary of {made.vocab}", err=True)


@command.command()
@_corpus_options
@click.option("--output", required=True, type=_PATH, help="a directory")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    help="bytes, sentencepiece:VOCAB to learn one, FILE.model, tokenizer.json, "
    "VOCAB.json,MERGES.txt, or a folder that holds one",
)
@click.option("--eod/--no-eod", "append_eod", default=True, help="end each document with a mark")
@click.option("--eod-token", "eod", help="the mark, where it is not the tokenizer's own")
@click.option("--workers", type=click.IntRange(min=1), help="processes; left out: as many as pay")
def prepare(inputs: tuple[Path, ...], output: Path, tokenizer: str, **settings: Any) -> None:
    """Make train, validation and test datasets from files of text.

    Files are JSON lines (.jsonl, also .gz and .zst), .parquet, .arrow, .txt, and folders that
    `datasets` saved. Killed, the same command goes on from where it was.
    """
    from graphtrain.data.prepare import prepare as prepare_data

    with _progress() as report:
        made = prepare_data(inputs, output, tokenizer, report=report, **settings)
    if made.up_to_date:
        click.echo(f"{output}: up to date, nothing to do", err=True)
    for name in ("train", "validation", "test"):
        split = getattr(made, name)
        if split is not None:
            click.echo(
                f"{output / name}: {split.documents} documents, {split.tokens} tokens, "
                f"vocabulary of {split.vocab}",
                err=True,
            )


@command.command()
@click.argument("prefixes", nargs=-1, required=True)
@click.option("--output", required=True, help="a prefix, as theirs")
def merge(prefixes: tuple[str, ...], output: str) -> None:
    """Write the documents of datasets, one dataset after another, as one dataset."""
    from graphtrain.data.description import summary
    from graphtrain.data.merge import merge as merge_data

    merge_data(prefixes, output)
    made = summary(output)
    click.echo(f"{output}: {made['documents']} documents, {made['tokens']} tokens", err=True)


@command.command()
@click.argument("prefixes", nargs=-1, required=True)
@click.option("--vocab", type=click.IntRange(min=1), help="tokens; left out: the description's")
def verify(prefixes: tuple[str, ...], vocab: int | None) -> None:
    """Read datasets to the last token and check all that they say of themselves."""
    from graphtrain.data.verify import verify as verify_data

    for prefix in prefixes:
        found = verify_data(prefix, vocab)
        click.echo(f"{prefix}: {found['documents']} documents, {found['tokens']} tokens, sound")


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


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on the terminal, where there is one."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=1.0)
        yield lambda stage, done: progress.update(task, description=stage, completed=done)
