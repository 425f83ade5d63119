"""Training of sentencepiece models."""

import io
from collections.abc import Iterable, Iterator, Sequence

from graphtrain.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from graphtrain.errors import DataError

_BYTE_PIECES = 260  # 256 bytes, and the pieces for unknown text, begin, end and padding


def train_sentencepiece(
    texts: Iterable[str], vocab: int, special: Sequence[str] = ()
) -> SentencePieceTokenizer:
    """Train a byte-pair encoding model of `vocab` pieces; equal texts give equal models.

    Texts are read line by line. Decoding restores them exactly: nothing is normalized, runs of
    spaces can be pieces, and characters without a piece are encoded as bytes. At most 5 million
    lines, sampled uniformly, are held in memory.

    Args:
        texts: The training texts.
        vocab: Vocabulary size.
        special: Special tokens: pieces of their own wherever a text spells them out.

    Raises:
        DataError: the texts yield fewer than `vocab` pieces, or need more.
    """
    import sentencepiece

    lines = _Lines(texts)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,  # digits are separate pieces, as in Llama, https://arxiv.org/abs/2302.13971
            max_sentence_length=1 << 16,  # bytes; longer lines are ignored
            user_defined_symbols=list(special),
            input_sentence_size=5_000_000,
            shuffle_input_sentence=True,
            num_threads=4,  # constant: stored in the model, hence part of its digest
            minloglevel=2,
        )
    except RuntimeError as error:
        if lines.error is not None:  # sentencepiece wraps errors that the texts raised
            raise lines.error from None
        raise DataError(
            f"sentencepiece cannot train {vocab} pieces from {lines.count} lines of training text: "
            f"{_reason(vocab, len(special), len(lines.characters), error)}"
        ) from None
    return SentencePieceTokenizer(model.getvalue())


class _Lines:
    """Iterable of the lines of texts that are not blank; stores the error that ended it."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.count = 0
        self.characters: set[str] = set()
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                for line in text.split("\n"):
                    if line and not line.isspace():
                        self.count += 1
                        self.characters.update(line)
                        yield line
        except Exception as error:
            self.error = error
            raise


def _reason(vocab: int, special: int, characters: int, error: RuntimeError) -> str:
    """Return why a vocabulary of this size cannot be trained, and what to choose instead."""
    needed = _BYTE_PIECES + special + characters
    if vocab < needed:
        return (
            f"that is too small, since the bytes and special tokens need "
            f"{_BYTE_PIECES + special}, and the {characters} characters of the text one each; use "
            f"{needed} or more, or --tokenizer chars or bytes"
        )
    return f"{_last_sentence(error)}; give more text, or choose a smaller size"


def _last_sentence(error: RuntimeError) -> str:
    """Return the last sentence of a sentencepiece error, without its source location."""
    reason = str(error).rsplit("] ", 1)[-1].strip().rstrip(".") or "there is no text"
    return reason.partition(". Increase vocab_size")[0]  # by options that graphtrain does not have
