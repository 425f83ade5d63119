"""`graphtrain data`: train tokenizers; tokenize, inspect, check and merge datasets."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from graphtrain.cli.options import FiniteRange, LocalPath
from graphtrain.cli.terminal import say
from graphtrain.cli.usage import Group
from graphtrain.files import counted

_PATH = LocalPath()
_FRACTION = FiniteRange(0, 1, max_open=True)


@click.group("data", cls=Group)
def command() -> None:
    """Tokenize text and conversations for training; inspect, check and merge datasets."""


def _corpus_options(function: Callable[..., None]) -> Callable[..., None]:
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
    return _files_options(function)


def _files_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments and options that select input files and the held-out documents."""
    options = [
        click.argument("inputs", nargs=-1, required=True, type=_PATH),
        click.option(
            "--validation",
            type=_FRACTION,
            help="Fraction of the documents for the validation set; 0 for none. [default: 0.05, or "
            "0 with --validation-from]",
        ),
        click.option(
            "--validation-from",
            multiple=True,
            type=_PATH,
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


_replace_option = click.option(
    "--replace",
    is_flag=True,
    help="Replace the dataset in the output directory if it was made from another request.",
)


def _worker_options(command: Callable) -> Callable:
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


@command.command()
@click.argument("output", type=_PATH)
@click.option(
    "--megabytes",
    type=FiniteRange(min=0),
    default=8.0,
    show_default=True,
    help="Maximum size of the corpus, in MB.",
)
@click.option(
    "--kind",
    type=click.Choice(["text", "instructions", "preferences"]),
    default="text",
    show_default=True,
    help="Kind of documents to write.",
)
def sample(output: Path, megabytes: float, kind: str) -> None:
    """Write a sample corpus from the docs and sources of this Python; no network is needed.

    --megabytes limits its size. With --kind instructions, each document is a question about a
    function and its docstring as the answer; with --kind preferences, a question with a right and a
    wrong answer.
    """
    from graphtrain.data.samples.instructions import write_instructions, write_preferences
    from graphtrain.data.samples.text import write_sample

    writers = {"instructions": write_instructions, "preferences": write_preferences}
    written = writers.get(kind, write_sample)(output, limit=int(megabytes * 1e6))
    say(f"{output}: {counted(written.documents, 'document')}, {written.text_bytes / 1e6:.1f} MB")


@command.command()
@_corpus_options
@click.option("--output", required=True, type=_PATH, help="Directory for the tokenizer.")
@click.option(
    "--kind",
    type=click.Choice(["sentencepiece", "bpe"]),
    default="sentencepiece",
    show_default=True,
    help="Kind of tokenizer: a sentencepiece model, or byte-level BPE as in GPT-2.",
)
@click.option("--vocab", type=click.IntRange(min=1), required=True, help="Number of tokens.")
@click.option("--special", multiple=True, help="Token that is never split. May be repeated.")
def tokenizer(output: Path, kind: str, vocab: int, special: tuple[str, ...], **corpus: Any) -> None:
    """Train a tokenizer on the training documents of a corpus.

    --kind sentencepiece (the default) writes tokenizer.model; --kind bpe trains a byte-level BPE
    tokenizer as GPT-2's and writes tokenizer.json. The documents are those that `prepare`, with the
    same options, puts into the training set.
    """
    from graphtrain.data.tokenizers.train import train_tokenizer

    inputs = corpus.pop("inputs")
    with progress() as report:
        trained = train_tokenizer(
            inputs, output, kind, vocab, special=special, report=report, **corpus
        )
    say(f"{trained.path}: vocabulary of {trained.vocab}")


@command.command()
@_corpus_options
@click.option("--output", required=True, type=_PATH, help="Directory for the datasets.")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    help="Tokenizer: bytes, chars for the characters of the training text, sentencepiece:VOCAB to "
    "train one of VOCAB tokens, FILE.model, tokenizer.json, VOCAB.json,MERGES.txt, or a directory "
    "with one of these.",
)
@click.option(
    "--bos/--no-bos",
    default=None,
    help="Begin each document with the beginning-of-sequence token. [default: as the "
    "tokenizer does by itself]",
)
@click.option(
    "--eod/--no-eod",
    "append_eod",
    default=True,
    help="Append the end-of-document token to each document. [default: --eod]",
)
@click.option("--eod-token", "eod", help="End-of-document token. [default: the tokenizer's own]")
@_replace_option
@_worker_options
def prepare(inputs: tuple[Path, ...], output: Path, tokenizer: str, **settings: Any) -> None:
    """Tokenize text files into train, validation and test datasets.

    INPUTS are JSON lines (.jsonl, also .gz and .zst), .parquet, .arrow and .txt files, and
    directories saved by the `datasets` library. If it is interrupted, the same command resumes.
    """
    from graphtrain.data.prepare.text import prepare as prepare_data

    with progress() as report:
        datasets = prepare_data(inputs, output, tokenizer, report=report, **settings)
    _print_splits(datasets, output, documents)
    if datasets.omitted_text:
        say(f"note: {datasets.omitted_text}")


@command.command()
@_files_options
@click.option("--output", required=True, type=_PATH, help="Directory for the datasets.")
@click.option("--tokenizer", help="Tokenizer of the model to fine-tune, as in prepare.")
@click.option(
    "--processor",
    type=_PATH,
    metavar="FOLDER",
    help="Folder of a model of text and images, in place of --tokenizer: its tokenizer, chat "
    "template and image processor, for records with images.",
)
@click.option(
    "--image-size",
    type=(click.IntRange(min=1), click.IntRange(min=1)),
    metavar="HEIGHT WIDTH",
    help="Pixels of every image, whatever its aspect ratio. [default: what the processor makes of "
    "the first one, and of all others]",
)
@click.option(
    "--chat-template",
    "template",
    metavar="NAME|FILE",
    default="own",
    show_default=True,
    help="Chat template: own for the tokenizer's own, one of alpaca, baichuan, baichuan2, chatml, "
    "internlm, internlm2, llama2, llama3, qwen, or a file.",
)
@click.option(
    "--format",
    default="auto",
    show_default=True,
    type=click.Choice(
        ["auto", "alpaca", "belle", "leetcode", "messages", "moss", "preference", "sharegpt"]
    ),
    help="Format of the records; auto recognizes it by their keys.",
)
@click.option(
    "--train-on",
    default="answers",
    show_default=True,
    type=click.Choice(["answers", "last", "all"]),
    help="Tokens to train on (the loss mask): all answers, the last answer of each conversation, "
    "or every token.",
)
@click.option(
    "--bos/--no-bos",
    default=None,
    help="Begin each document with the beginning-of-sequence token. [default: as the "
    "chat template does]",
)
@click.option(
    "--eod-token", "eod", help="Token that ends an answer. [default: the tokenizer's own]"
)
@_replace_option
@_worker_options
def instruct(
    inputs: tuple[Path, ...],
    output: Path,
    tokenizer: str | None,
    processor: Path | None,
    image_size: tuple[int, int] | None,
    **settings: Any,
) -> None:
    """Tokenize conversations, or pairs of a chosen and a rejected answer, into datasets.

    Each dataset also stores a loss mask: by default only the answers are trained on. INPUTS are
    files that `prepare` reads, and JSON arrays. If it is interrupted, the same command resumes.
    """
    if (tokenizer is None) == (processor is None):
        raise click.UsageError("give --tokenizer, or --processor for records with images")
    with progress() as report:
        if processor is not None:
            datasets = _instruct_images(
                inputs, output, processor, image_size=image_size, report=report, **settings
            )
        elif image_size is not None:
            raise click.UsageError("--image-size needs --processor")
        else:
            from graphtrain.data.prepare.instructions import instruct as instruct_data

            datasets = instruct_data(inputs, output, tokenizer or "", report=report, **settings)
    _print_splits(datasets, output, _conversations)
    if datasets.skipped_records:
        were = "was" if datasets.skipped_records == 1 else "were"
        say(f"{counted(datasets.skipped_records, 'record')} without an answer {were} skipped")
    if datasets.missing_bos:
        say(
            "the chat template does not write the beginning-of-sequence token that the tokenizer "
            "puts before a text; documents begin without it, as in transformers (--bos adds it)"
        )
    if datasets.spelled_out:
        say(
            f"the tokenizer has no token for {', '.join(datasets.spelled_out)} of the chat "
            "template; encoded as ordinary text"
        )


def _instruct_images(
    *arguments: Any, format: str = "auto", ray: str | None = None, **settings: Any
) -> Any:
    """Prepare conversations with images, which have one format and are read on this machine."""
    from graphtrain.data.prepare.image_instructions import instruct_images

    if format not in ("auto", "messages"):
        raise click.UsageError(f"--format {format}: records with images have the format messages")
    if ray is not None:
        raise click.UsageError("--ray: images are read by worker processes of this machine")
    return instruct_images(*arguments, **settings)


def _print_splits(datasets: Any, output: Path, describe: Callable[[Any], str]) -> None:
    """Print the path and the contents of each dataset."""
    if datasets.up_to_date:
        say(f"{output}: up to date, nothing to do")
    for name in ("train", "validation", "test"):
        split = getattr(datasets, name)
        if split is not None:
            say(f"{output / name}: {describe(split)}")


def _totals(totals: Any) -> str:
    return f"{counted(totals['documents'], 'document')}, {counted(totals['tokens'], 'token')}"


def documents(split: Any) -> str:
    """Return the numbers of documents, tokens and the vocabulary of a split."""
    documents, tokens = counted(split.documents, "document"), counted(split.tokens, "token")
    return f"{documents}, {tokens}, vocabulary of {split.vocab}"


def supports_color() -> bool:
    """Return whether standard output is a terminal with colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _conversations(split: Any) -> str:
    conversations = split.conversations
    count = (
        counted(split.documents // 2, "pair")
        if conversations.pairs
        else counted(split.documents, "conversation")
    )
    text = f"{count}, {counted(split.tokens, 'token')}, {conversations.learned} of them trained on"
    if (images := split.images) is None:
        return text
    return f"{text}, {counted(images.count, 'image')} of {images.height} x {images.width} pixels"


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
    say(f"{output}: {_totals(totals)}")


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
        click.echo(f"{prefix}: {_totals(totals)}, {verdict}")


@command.command()
@click.argument("url")
@click.argument("directory", type=_PATH)
@click.option(
    "--endpoint",
    help="Server of an S3-compatible store. [default: $AWS_ENDPOINT_URL]",
)
def pull(url: str, directory: Path, endpoint: str | None) -> None:
    """Download the folder at URL into a new DIRECTORY, and verify the datasets in it.

    URL is s3://, gs:// or az://, or a directory. The folder may also be a Hugging Face model, text
    to prepare, or configurations; only datasets are verified.
    """
    from graphtrain.cache.sizes import format_size
    from graphtrain.checkpoints.download import download_folder
    from graphtrain.data.indexed.images import is_images_prefix
    from graphtrain.data.indexed.verify import verify as verify_data

    verified = []

    def verify_datasets(folder: Path) -> None:
        for index in sorted(folder.rglob("*.idx")):
            prefix = index.with_suffix("")
            if is_images_prefix(prefix):  # verified with its dataset
                continue
            verify_data(prefix)
            verified.append(directory / prefix.relative_to(folder))

    sizes = download_folder(url, directory, verify_datasets, endpoint)
    count = counted(len(sizes), "file")
    say(f"{directory}: {count}, {format_size(sum(sizes.values()))} from {url}")
    for prefix in verified:
        click.echo(f"{prefix}: intact")


@command.command()
@click.argument("name")
@click.argument("output", type=_PATH)
@click.option("--config", "configuration", help="Configuration. [default: the only one]")
@click.option(
    "--split", default="train", show_default=True, help="Split, or a part of it: train[:1%]."
)
@click.option("--revision", help="Commit, branch or tag. [default: the newest]")
@click.option(
    "--streaming",
    is_flag=True,
    help="Read row by row over the network, without a copy in the cache of `datasets`.",
)
@click.option(
    "--column", "columns", multiple=True, help="Column to write. May be repeated. [default: all]"
)
@click.option("--rows", "limit", type=click.IntRange(min=1), help="Number of rows. [default: all]")
def hub(
    name: str, output: Path, columns: tuple[str, ...], limit: int | None, **choice: Any
) -> None:
    """Write a dataset of the Hugging Face hub to OUTPUT as JSON lines, for `prepare`.

    NAME is its name on the hub, OWNER/NAME, or a folder of data files. No code of it is run.
    """
    from graphtrain.data.readers.hub import HubDataset, write_rows

    dataset = HubDataset(name, **choice)
    with progress() as report:
        rows = write_rows(dataset, output, columns=columns, limit=limit, report=report)
    say(f"{output}: {counted(rows, 'row')} of {dataset}")


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
@click.argument("directory", type=_PATH)
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


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=1.0)
        yield lambda stage, fraction: progress.update(task, description=stage, completed=fraction)
