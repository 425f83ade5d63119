"""What the numbers of a dataset mean: PREFIX.json, beside its .bin and .idx."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from graphtrain.data.indexed.dataset import IndexedDataset, dataset_paths
from graphtrain.data.indexed.loss_spans import Learned, learned_prefix
from graphtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from graphtrain.errors import DataError
from graphtrain.files import content_digest, replacing

_BEGINNING = 256  # tokens of the first document that a summary shows


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """How a dataset of conversations was made."""

    template: str  # its name
    template_digest: str
    learn: str  # answers, last or all
    pairs: bool  # documents 2i and 2i + 1 are the chosen and the rejected one of a pair
    learned: int = 0  # tokens
    digests: dict[str, str] | None = None  # of the files that say what is learned

    def of(self, prefix: str | Path) -> "Conversations":
        """The same, with what is known of the dataset once it is written."""
        learned = Learned(IndexedDataset(prefix)).count()
        return replace(self, learned=learned, digests=file_digests(learned_prefix(prefix)))

    @property
    def made(self) -> tuple[str, str, bool]:
        """What datasets have in common that can be one."""
        return self.template_digest, self.learn, self.pairs


@dataclass(frozen=True, kw_only=True)
class Description:
    """The tokenizer a dataset was made with, and its size."""

    tokenizer: str  # its kind
    tokenizer_digest: str
    tokenizer_file: str | None  # in the directory of the dataset
    vocab: int
    eod: int | None  # the token at the end of every document; None: there is none
    documents: int
    tokens: int
    digests: dict[str, str] | None = None  # of the .bin and the .idx, by ending
    conversations: Conversations | None = None  # None: it is text


def file_digests(prefix: str | Path) -> dict[str, str]:
    """Of the two files of a dataset."""
    return {path.suffix[1:]: content_digest(path) for path in dataset_paths(prefix)}


def write_description(prefix: str | Path, description: Description) -> None:
    with replacing(Path(f"{prefix}.json")) as file:
        file.write((json.dumps(asdict(description), indent=2) + "\n").encode())


def read_description(prefix: str | Path) -> Description | None:
    """The description of a dataset; None where it has none, as those that Megatron made.

    Raises:
        DataError: the file does not hold a description.
    """
    path = Path(f"{prefix}.json")
    try:
        found = json.loads(path.read_text())
        if (conversations := found.get("conversations")) is not None:
            found["conversations"] = Conversations(**conversations)
        return Description(**found)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the description of a dataset ({error})") from None


def dataset_tokenizer(prefix: str | Path) -> Tokenizer | None:
    """The tokenizer a dataset was made with; None where it has no description.

    Raises:
        DataError: the tokenizer's file is missing, or is not the one the dataset was made with.
    """
    description = read_description(prefix)
    if description is None:
        return None
    file = description.tokenizer_file
    tokenizer = load_tokenizer(Path(prefix).parent / file if file else description.tokenizer)
    if tokenizer.digest != description.tokenizer_digest:
        raise DataError(
            f"{Path(prefix).parent / str(file)}: not the tokenizer that {prefix} was made with; "
            "prepare the dataset again"
        )
    return tokenizer


def summary(prefix: str | Path) -> dict[str, int | str | bool | None]:
    """What a dataset holds, for a person to look at; text is None where the tokenizer is unknown.

    Raises:
        DataError: the dataset or its description cannot be used.
    """
    dataset = IndexedDataset(prefix)
    description = read_description(prefix)
    tokenizer = dataset_tokenizer(prefix)
    beginning = dataset.document(0)[:_BEGINNING].tolist()
    conversations = description.conversations if description else None
    return {
        "documents": len(dataset),
        "tokens": len(dataset.tokens),
        "dtype": dataset.dtype.name,
        "tokenizer": description.tokenizer if description else None,
        "vocab": description.vocab if description else None,
        "eod": description.eod if description else None,
        "longest": int(np.diff(dataset.document_offsets).max()),
        **(_about(conversations) if conversations else {}),
        "text": tokenizer.decode(beginning) if tokenizer else None,
    }


def _about(conversations: Conversations) -> dict[str, int | str | bool | None]:
    return {
        "template": conversations.template,
        "learn": conversations.learn,
        "learned tokens": conversations.learned,
        "pairs": conversations.pairs,
    }
