"""Commands of `graphtrain data` that make tokenizers and datasets of text."""

from pathlib import Path
from typing import Any

import click

from graphtrain.cli.data_options import (
    LOCAL_PATH,
    corpus_options,
    files_options,
    replace_option,
    worker_options,
)
from graphtrain.cli.data_output import (
    describe_conversations,
    describe_documents,
    print_splits,
    progress,
)
from graphtrain.cli.terminal import say
from graphtrain.files import counted


@click.command()
@corpus_options
@click.option("--output", required=True, type=LOCAL_PATH, help="Directory for the tokenizer.")
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


@click.command()
@corpus_options
@click.option("--output", required=True, type=LOCAL_PATH, help="Directory for the datasets.")
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
@replace_option
@worker_options
def prepare(inputs: tuple[Path, ...], output: Path, tokenizer: str, **settings: Any) -> None:
    """Tokenize text files into train, validation and test datasets.

    INPUTS are JSON lines (.jsonl, also .gz and .zst), .parquet, .arrow and .txt files, and
    directories saved by the `datasets` library. If it is interrupted, the same command resumes.
    """
    from graphtrain.data.prepare.text import prepare as prepare_data

    with progress() as report:
        datasets = prepare_data(inputs, output, tokenizer, report=report, **settings)
    print_splits(datasets, output, describe_documents)
    if datasets.omitted_text:
        say(f"note: {datasets.omitted_text}")


@click.command()
@files_options
@click.option("--output", required=True, type=LOCAL_PATH, help="Directory for the datasets.")
@click.option("--tokenizer", help="Tokenizer of the model to fine-tune, as in prepare.")
@click.option(
    "--processor",
    type=LOCAL_PATH,
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
@replace_option
@worker_options
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
    print_splits(datasets, output, describe_conversations)
    _print_notes(datasets)


def _print_notes(datasets: Any) -> None:
    """Print what is not as a reader of the records and the chat template would expect."""
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
