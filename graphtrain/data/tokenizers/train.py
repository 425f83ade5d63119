"""Learning a tokenizer from a corpus, to be used by many preparations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.data.prepare.text import training_texts
from graphtrain.data.readers.corpus import Corpus
from graphtrain.data.tokenizers.huggingface import train_bpe
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.errors import DataError


@dataclass(frozen=True)
class LearnedTokenizer:
    """A tokenizer on disk."""

    path: Path
    vocab: int


def learn_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    kind: str,
    vocab: int,
    *,
    special: Sequence[str] = (),
    report: Callable[[str, float], None] = lambda stage, fraction: None,
    **corpus: Any,
) -> LearnedTokenizer:
    """Learn from the training documents of the inputs; write the tokenizer into a directory.

    Args:
        inputs: Files, or folders that `datasets` saved.
        output: The directory.
        kind: sentencepiece or bpe.
        vocab: Tokens it has in the end; byte-level pairs may be fewer where the text has no more.
        special: Tokens that are never cut.
        report: Told what is being done, and the fraction of it that is.
        corpus: What else `Corpus` takes.

    Raises:
        DataError: an input cannot be used, or the text does not hold so many tokens.
    """
    learn = {"sentencepiece": train_sentencepiece, "bpe": train_bpe}[kind]
    tokenizer = learn(training_texts(Corpus.of(inputs, **corpus), report), vocab, special)
    try:
        names = tokenizer.save(Path(output))
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    return LearnedTokenizer(Path(output) / names[0], tokenizer.vocab)
