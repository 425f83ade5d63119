"""Output of the commands of `graphtrain data`: progress, and what a dataset contains."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphtrain.cli.terminal import say
from graphtrain.files import counted


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=1.0)
        yield lambda stage, fraction: progress.update(task, description=stage, completed=fraction)


def print_splits(datasets: Any, output: Path, describe: Callable[[Any], str]) -> None:
    """Print the path and the contents of each dataset."""
    if datasets.up_to_date:
        say(f"{output}: up to date, nothing to do")
    for name in ("train", "validation", "test"):
        split = getattr(datasets, name)
        if split is not None:
            say(f"{output / name}: {describe(split)}")


def describe_totals(totals: Mapping[str, Any]) -> str:
    """Return the numbers of documents and tokens of a dataset."""
    return f"{counted(totals['documents'], 'document')}, {counted(totals['tokens'], 'token')}"


def describe_documents(split: Any) -> str:
    """Return the numbers of documents, tokens and the vocabulary of a split."""
    documents, tokens = counted(split.documents, "document"), counted(split.tokens, "token")
    return f"{documents}, {tokens}, vocabulary of {split.vocab}"


def describe_conversations(split: Any) -> str:
    """Return the numbers of conversations or pairs, of tokens, and of images of a split."""
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
