"""Training of a tokenizer on a corpus, for use by several `prepare` commands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.data.prepare.text import training_texts
from graphtrain.data.readers.corpus import Corpus
from graphtrain.data.tokenizers.huggingface import train_bpe
from graphtrain.data.tokenizers.open import TOKENIZER_FILES, load_tokenizer
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.errors import DataError
from graphtrain.files import output_exists


@dataclass(frozen=True)
class TrainedTokenizer:
    """Trained tokenizer on disk."""

    path: Path
    vocab: int


def train_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    kind: str,
    vocab: int,
    *,
    special: Sequence[str] = (),
    report: Callable[[str, float], None] = lambda stage, fraction: None,
    **corpus: Any,
) -> TrainedTokenizer:
    """Train a tokenizer on the training documents of the inputs; write it into a directory.

    Args:
        inputs: Files, or folders written by `datasets.Dataset.save_to_disk`.
        output: Output directory.
        kind: sentencepiece or bpe.
        vocab: Vocabulary size; bpe may stop below it if the text has no more pairs.
        special: Special tokens, which are never split.
        report: Called with the current stage and its completed fraction.
        corpus: Other fields of `Corpus`.

    Raises:
        DataError: an input cannot be used, or the text is too small for the vocabulary.
        OutputExists: the directory has another tokenizer.
    """
    learn = {"sentencepiece": train_sentencepiece, "bpe": train_bpe}[kind]
    tokenizer = learn(training_texts(Corpus.from_inputs(inputs, **corpus), report), vocab, special)
    _check_output(Path(output), tokenizer)
    try:
        names = tokenizer.save(Path(output))
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    return TrainedTokenizer(Path(output) / names[0], tokenizer.vocab)


def _check_output(directory: Path, tokenizer: Tokenizer) -> None:
    """Refuse to replace another tokenizer."""
    for name in TOKENIZER_FILES:
        if (directory / name).exists():
            try:
                if load_tokenizer(directory / name).digest == tokenizer.digest:
                    continue
            except DataError:  # no tokenizer, or a damaged one
                pass
            raise output_exists(directory / name)
