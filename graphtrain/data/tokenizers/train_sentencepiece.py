"""Learning a sentencepiece model."""

import io
from collections.abc import Iterable, Iterator, Sequence

from graphtrain.data.tokenizers.tokenizer import SentencePieceTokenizer
from graphtrain.errors import DataError


def train_sentencepiece(
    texts: Iterable[str], vocab: int, special: Sequence[str] = ()
) -> SentencePieceTokenizer:
    """Learn `vocab` pieces by byte-pair encoding; the same texts give the same pieces.

    Text is learned line by line and comes back from decoding as it was: nothing is normalized,
    runs of spaces may be pieces, and what no piece covers is spelled in bytes. At most
    5 million lines are held in memory, drawn evenly from all. Special tokens are pieces of their
    own wherever the text spells them out.

    Raises:
        DataError: the text does not hold that many pieces, or more than fit in the vocabulary.
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
            split_digits=True,  # as Llama: numbers are spelled, https://arxiv.org/abs/2302.13971
            max_sentence_length=1 << 16,  # bytes; longer lines are not learned from
            user_defined_symbols=list(special),
            input_sentence_size=5_000_000,
            shuffle_input_sentence=True,
            num_threads=4,  # a constant: it is written into the model, and so into its digest
            minloglevel=2,
        )
    except RuntimeError as error:
        if lines.error is not None:  # sentencepiece reports what the texts raised as its own
            raise lines.error from None
        raise DataError(
            f"sentencepiece cannot learn {vocab} pieces from {lines.count} lines of training text: "
            f"{_reason(error)}; give more text, or choose another size (260 are needed for bytes)"
        ) from None
    return SentencePieceTokenizer(model.getvalue())


class _Lines:
    """The lines of texts that are not blank; remembers what stopped them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.count = 0
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                for line in text.split("\n"):
                    if line and not line.isspace():
                        self.count += 1
                        yield line
        except Exception as error:
            self.error = error
            raise


def _reason(error: RuntimeError) -> str:
    """The sentence sentencepiece ends with, without the place in its source."""
    return str(error).rsplit("] ", 1)[-1].strip().rstrip(".") or "there is no text"
