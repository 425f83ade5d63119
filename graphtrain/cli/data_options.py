"""Arguments and options of the commands of `graphtrain data`."""

from collections.abc import Callable

import click

from graphtrain.cli.options import FiniteRange, LocalPath

LOCAL_PATH = LocalPath()
_FRACTION = FiniteRange(0, 1, max_open=True)


def corpus_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments and options that select the text to read from files."""
    options = [
        click.option(
            "--key",
            "keys",
            multiple=True,
            default=("text",),
            show_default=True,
            help="Key of the text in a JSON object, or column of a table. May be repeated; the "
            "texts are joined by a blank line.",
        ),
        click.option(
            "--clean",
            multiple=True,
            metavar="MODULE:FUNCTION",
            help="Function that receives a text and returns the text to keep, or None to drop the "
            "document. May be repeated.",
        ),
        click.option(
            "--text-document",
            type=click.Choice(["line", "paragraph", "file"]),
            default="paragraph",
            show_default=True,
            help="Part of a .txt file that is one document.",
        ),
        click.option(
            "--split",
            "split_by",
            type=click.Choice(["documents", "text"]),
            default="documents",
            show_default=True,
            help="Hold out whole documents for validation and test, or the end of the text of each "
            "document: then one document is enough.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return files_options(function)


def files_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments and options that select input files and the held-out documents."""
    options = [
        click.argument("inputs", nargs=-1, required=True, type=LOCAL_PATH),
        click.option(
            "--validation",
            type=_FRACTION,
            help="Fraction of the documents for the validation set; 0 for none. [default: 0.05, or "
            "0 with --validation-from]",
        ),
        click.option(
            "--validation-from",
            multiple=True,
            type=LOCAL_PATH,
            metavar="FILE",
            help="Input whose documents are all for the validation set, in addition to INPUTS. May "
            "be repeated.",
        ),
        click.option(
            "--test",
            type=_FRACTION,
            default=0.0,
            show_default=True,
            help="Fraction of the documents for the test set; 0 for none.",
        ),
        click.option(
            "--seed",
            default=0,
            show_default=True,
            help="Seed for the choice of the validation and test documents.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


replace_option = click.option(
    "--replace",
    is_flag=True,
    help="Replace the dataset in the output directory if it was made from another request.",
)


def worker_options(command: Callable) -> Callable:
    """Add the options that say which processes tokenize."""
    for option in (
        click.option(
            "--ray",
            metavar="ADDRESS",
            help="Ray cluster whose machines tokenize in place of worker processes: HOST:PORT, "
            "auto for the one that this machine is in, or local to start one on this machine.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            help="Number of worker processes; with --ray, of chunks in flight. [default: by the "
            "size of the corpus, at most one per core; with --ray, two per CPU of the cluster]",
        ),
    ):
        command = option(command)
    return command
