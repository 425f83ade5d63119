"""`graphtrain data`: make a corpus or a tokenizer, prepare text, look into and join datasets."""

import json
import os
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
    ]
    for option in reversed(options):
        function = option(function)
    return _files_options(function)


def _files_options(function: Callable[..., None]) -> Callable[..., None]:
    """What says which files are read, and what of them is held out."""
    options = [
        click.argument("inputs", nargs=-1, required=True, type=_PATH),
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
@click.option(
    "--kind",
    type=click.Choice(["text", "instructions", "preferences"]),
    default="text",
    show_default=True,
    help="preferences: a right answer and a wrong one",
)
def sample(output: Path, megabytes: float, kind: str) -> None:
    """Write a corpus of real text that every Python carries, without a network.

    Instructions and preferences ask what a function does; its docstring answers.
    """
    from graphtrain.data.samples.instructions import write_instructions, write_preferences
    from graphtrain.data.samples.text import write_sample

    writers = {"instructions": write_instructions, "preferences": write_preferences}
    written = writers.get(kind, write_sample)(output, limit=int(megabytes * 1e6))
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
    from graphtrain.data.tokenizers.train import train_tokenizer

    inputs = corpus.pop("inputs")
    with _progress() as report:
        made = train_tokenizer(
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
    from graphtrain.data.prepare.text import prepare as prepare_data

    with _progress() as report:
        made = prepare_data(inputs, output, tokenizer, report=report, **settings)
    _tell_splits(made, output, _documents)


@command.command()
@_files_options
@click.option("--output", required=True, type=_PATH, help="a directory")
@click.option("--tokenizer", required=True, help="as for prepare; that of the model to be tuned")
@click.option(
    "--template",
    default="own",
    show_default=True,
    help="the tokenizer's own, one of alpaca, baichuan, baichuan2, chatml, internlm, internlm2, "
    "llama2, llama3, qwen, or a file",
)
@click.option(
    "--format",
    default="auto",
    show_default=True,
    type=click.Choice(
        ["auto", "alpaca", "belle", "leetcode", "messages", "moss", "preference", "sharegpt"]
    ),
    help="of the records; auto: by their keys",
)
@click.option(
    "--learn",
    default="answers",
    show_default=True,
    type=click.Choice(["answers", "last", "all"]),
    help="all answers, the last of a conversation, or every token",
)
@click.option("--eod-token", "eod", help="what ends an answer, where it is not the tokenizer's own")
@click.option("--workers", type=click.IntRange(min=1), help="processes; left out: as many as pay")
def instruct(inputs: tuple[Path, ...], output: Path, tokenizer: str, **settings: Any) -> None:
    """Make datasets of conversations, of which the answers are learned, or of preferred answers.

    Files are those that `prepare` takes, and JSON arrays. Killed, the same command goes on from
    where it was.
    """
    from graphtrain.data.prepare.instructions import instruct as instruct_data

    with _progress() as report:
        made = instruct_data(inputs, output, tokenizer, report=report, **settings)
    _tell_splits(made, output, _conversations)
    if made.skipped_records:
        click.echo(f"{made.skipped_records} records without an answer are left out", err=True)
    if made.spelled_out:
        click.echo(
            f"the tokenizer has no tokens for {', '.join(made.spelled_out)}; they are spelled out",
            err=True,
        )


def _tell_splits(made: Any, output: Path, describe: Callable[[Any], str]) -> None:
    """Where each dataset is and what is in it."""
    if made.up_to_date:
        click.echo(f"{output}: up to date, nothing to do", err=True)
    for name in ("train", "validation", "test"):
        split = getattr(made, name)
        if split is not None:
            click.echo(f"{output / name}: {describe(split)}", err=True)


def _documents(split: Any) -> str:
    return f"{split.documents} documents, {split.tokens} tokens, vocabulary of {split.vocab}"


def has_colours() -> bool:
    """Whether output goes to a terminal that shows them."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _conversations(split: Any) -> str:
    about = split.conversations
    count = f"{split.documents // 2} pairs" if about.pairs else f"{split.documents} conversations"
    return f"{count}, {split.tokens} tokens, {about.learned} of them learned"


@command.command()
@click.argument("prefix")
@click.option("--first", type=click.IntRange(min=0), default=0, help="the document to begin with")
@click.option("--documents", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--length", type=click.IntRange(min=1), help="also say how rows of so many tokens are filled"
)
def preview(prefix: str, first: int, documents: int, length: int | None) -> None:
    """Show documents of a dataset: green what is learned, dim what is not.

    Where there are no colours, what is learned is between >>> and <<<.
    """
    from graphtrain.data.preview import masked_documents, packing_report

    colours = has_colours()
    for number, document in masked_documents(prefix, first, documents):
        click.echo(f"document {number}: {sum(len(one.tokens) for one in document)} tokens")
        for one in document:
            if colours:
                colour = "green" if one.learned else None
                click.secho(one.text, nl=False, fg=colour, dim=not one.learned)
            else:
                click.echo(f">>>{one.text}<<<" if one.learned else one.text, nl=False)
        click.echo("\n")
    if length is not None:
        click.echo(packing_report(prefix, length))


@command.command()
@click.argument("prefixes", nargs=-1, required=True)
@click.option("--output", required=True, help="a prefix, as theirs")
def merge(prefixes: tuple[str, ...], output: str) -> None:
    """Write the documents of datasets, one dataset after another, as one dataset."""
    from graphtrain.data.indexed.description import summary
    from graphtrain.data.indexed.merge import merge as merge_data

    merge_data(prefixes, output)
    made = summary(output)
    click.echo(f"{output}: {made['documents']} documents, {made['tokens']} tokens", err=True)


@command.command()
@click.argument("prefixes", nargs=-1, required=True)
@click.option("--vocab", type=click.IntRange(min=1), help="tokens; left out: the description's")
def verify(prefixes: tuple[str, ...], vocab: int | None) -> None:
    """Read datasets to the last token and check all that they say of themselves."""
    from graphtrain.data.indexed.verify import verify as verify_data

    for prefix in prefixes:
        found = verify_data(prefix, vocab)
        click.echo(f"{prefix}: {found['documents']} documents, {found['tokens']} tokens, sound")


@command.command()
@click.argument("prefix")
@click.option("--json", "as_json", is_flag=True, help="for programs")
def inspect(prefix: str, as_json: bool) -> None:
    """Say what a dataset holds. PREFIX is its name without .bin and .idx."""
    from graphtrain.data.indexed.description import summary

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
