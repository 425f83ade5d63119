"""`graphtrain data`: train tokenizers; tokenize, inspect, check and merge datasets."""

import json
import os
import sys
from pathlib import Path

import click

from graphtrain.cli.data_options import LOCAL_PATH
from graphtrain.cli.data_output import describe_totals
from graphtrain.cli.data_prepare import instruct, prepare, tokenizer
from graphtrain.cli.data_sources import hub, pull, sample
from graphtrain.cli.terminal import say
from graphtrain.cli.usage import Group
from graphtrain.files import counted


@click.group("data", cls=Group)
def command() -> None:
    """Tokenize text and conversations for training; inspect, check and merge datasets."""


for _command in (hub, instruct, prepare, pull, sample, tokenizer):
    command.add_command(_command)


def supports_color() -> bool:
    """Return whether standard output is a terminal with colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


@command.command()
@click.argument("prefix")
@click.option(
    "--first",
    type=click.IntRange(min=0),
    default=0,
    help="Index of the first document. [default: 0]",
)
@click.option(
    "--documents",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of documents to show.",
)
@click.option(
    "--length",
    type=click.IntRange(min=1),
    help="Also report how full rows of this many tokens are when documents are packed into them.",
)
def preview(prefix: str, first: int, documents: int, length: int | None) -> None:
    """Show documents of a dataset: tokens that are trained on in green, others dimmed.

    Without colours, the tokens that are trained on appear between >>> and <<<. --documents is the
    number of documents to show.
    """
    from graphtrain.data.preview import masked_documents, packing_report

    colours = supports_color()
    for index, document in masked_documents(prefix, first, documents):
        click.echo(
            f"document {index}: {counted(sum(len(span.tokens) for span in document), 'token')}"
        )
        for span in document:
            if colours:
                colour = "green" if span.learned else None
                click.secho(span.text, nl=False, fg=colour, dim=not span.learned)
            else:
                click.echo(f">>>{span.text}<<<" if span.learned else span.text, nl=False)
        click.echo("\n")
    if length is not None:
        click.echo(packing_report(prefix, length))


@command.command()
@click.argument("prefixes", nargs=-1, required=True)
@click.option(
    "--output", required=True, help="Prefix of the merged dataset: its path without .bin and .idx."
)
@click.option("--replace", is_flag=True, help="Replace the dataset at --output if there is one.")
def merge(prefixes: tuple[str, ...], output: str, replace: bool) -> None:
    """Concatenate the documents of several datasets into one dataset.

    PREFIXES are paths of datasets, without .bin and .idx.
    """
    from graphtrain.data.indexed.description import summary
    from graphtrain.data.indexed.merge import merge as merge_data

    merge_data(prefixes, output, replace=replace)
    totals = summary(output)
    say(f"{output}: {describe_totals(totals)}")


@command.command()
@click.argument("prefixes", nargs=-1, required=True)
@click.option(
    "--vocab",
    type=click.IntRange(min=1),
    help="Vocabulary size that token ids must be below. [default: that of PREFIX.json]",
)
def verify(prefixes: tuple[str, ...], vocab: int | None) -> None:
    """Read every token of datasets, and check them against their indexes and descriptions."""
    from graphtrain.data.indexed.verify import unverified
    from graphtrain.data.indexed.verify import verify as verify_data

    for prefix in prefixes:
        totals = verify_data(prefix, vocab)
        without = unverified(prefix, vocab)
        verdict = f"the index is consistent, but {without}" if without else "intact"
        click.echo(f"{prefix}: {describe_totals(totals)}, {verdict}")


@command.command()
@click.argument("prefix")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def inspect(prefix: str, as_json: bool) -> None:
    """Print a summary of a dataset. PREFIX is its path without .bin and .idx."""
    from graphtrain.data.indexed.description import summary

    facts = summary(prefix)
    if as_json:
        json.dump(facts, sys.stdout)
        click.echo()
        return
    for name, value in facts.items():
        click.echo(f"{name}: {value}")


@command.command()
@click.argument("directory", type=LOCAL_PATH)
@click.argument("names", nargs=-1, required=True, metavar="TASKS...")
@click.option(
    "--script",
    is_flag=True,
    help="Print a program of Python that fills DIRECTORY on a connected machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def tasks(directory: Path, names: tuple[str, ...], script: bool, as_json: bool) -> None:
    """Check the data of tasks of lm-eval in DIRECTORY: files, fields, rows and digests.

    TASKS are names of tasks, groups and tags of lm-eval, or YAML files of tasks. Exits with 2 if a
    task cannot be evaluated on what is there.
    """
    from lowering.machine.extras import optional_import

    with optional_import("graphtrain data tasks"):
        from graphtrain.run.evaluation.task_directory import (
            check_directory,
            errors_of,
            fill_script,
        )

    if script:
        click.echo(fill_script(names, directory), nl=False)
        return
    reports = check_directory(names, directory)
    if as_json:
        click.echo(json.dumps([vars(report) for report in reports]))
    for report in () if as_json else reports:
        for split, file in report.files.items():
            rows, digest = counted(file["rows"], "row"), file["sha256"][:16]
            click.echo(f"{report.task} {split}: {rows}, {digest}, {file['file']}")
    for problem in () if as_json else errors_of(reports, names, directory):
        say(f"error: {problem}")
    if any(report.problem is not None for report in reports):
        sys.exit(2)
