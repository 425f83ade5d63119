"""Encoding with a cache of words, for tokenizers where the result is exactly the same.

Sentencepiece's byte-pair encoding merges neighbours only into existing pieces. If no piece
continues after a space, and none contains a line break with other characters, no merge crosses from
a word to the spaces after it or over the end of a line; a word then has the same token ids in every
text. If no piece mixes letters with other characters, the same is true of these parts of a word.

GPT-2's regular expression splits every text between a word and a space or line break after it,
whatever the context, and merges stay inside its parts. (Llama 3's attaches line breaks to the
preceding characters.)

Source: Radford et al. 2019, the expression in https://github.com/openai/gpt-2, src/encoder.py
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

_SPACE = "\u2581"  # sentencepiece's symbol for a space
# Letters of a word, and other characters of it, each with the preceding spaces.
WORD_PARTS_PATTERN = re.compile(
    f"[ {_SPACE}]*(?:[^\\W\\d_]+|(?:[^\\w {_SPACE}\n]|[\\d_])+)|[ {_SPACE}]+|\n"
)
WORDS_PATTERN = re.compile(f"\n|[ {_SPACE}]*[^ {_SPACE}\n]+|[ {_SPACE}]+")
# Other white space is not a boundary: the regular expression engine of the tokenizers library may
# not treat it as white space.
GPT2_WORDS_PATTERN = re.compile(r"\s*\S+(?:(?![ \n])\s+(?:\S+|\Z))*|\s+")
_MAX_CACHED_WORDS = 1 << 19  # maximum cached words; the cache is cleared when it is full
_MAX_WORD_CHARACTERS = 32  # maximum characters of a cached word


class WordCache:
    """Cache of the token ids of words, for a tokenizer that encodes words independently."""

    def __init__(
        self,
        expression: re.Pattern[str],
        encode: Callable[[list[str]], Sequence[list[int]]],
        parts: re.Pattern[str] | None = None,
    ) -> None:
        """Build an empty cache.

        Args:
            expression: Splits a text into words; must match every character of a text.
            encode: Encodes words that are not cached.
            parts: Splits words that are not cached into parts, which have a cache of their own.
        """
        self._expression = expression
        self._parts = WordCache(parts, encode) if parts else None
        self._encode = encode
        self._known: dict[str, bytes] = {}  # int32 arrays: bytes are joined faster than lists

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, equal to those of the tokenizer itself."""
        return [np.frombuffer(token_bytes, np.int32) for token_bytes in self._bytes(texts)]

    def _bytes(self, texts: Sequence[str]) -> list[bytes]:
        """Return the token ids of each text as the bytes of an int32 array."""
        words_by_text = [self._expression.findall(text) for text in texts]
        cache = self._known
        uncached = list(set(chain.from_iterable(words_by_text)).difference(cache))
        encoded_words = (
            self._parts._bytes(uncached) if self._parts else _as_bytes(self._encode(uncached))
        )
        cache.update(zip(uncached, encoded_words, strict=True))
        encoded = [b"".join(map(cache.__getitem__, text_words)) for text_words in words_by_text]
        if len(cache) > _MAX_CACHED_WORDS:
            cache.clear()
        else:
            for word in uncached:
                if len(word) > _MAX_WORD_CHARACTERS:
                    del cache[word]
        return encoded


def _as_bytes(encoded: Sequence[list[int]]) -> Iterator[bytes]:
    """Yield each list as the bytes of an int32 array."""
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded))) * 4
    token_bytes = np.fromiter(chain.from_iterable(encoded), np.int32).tobytes()
    for start, end in pairwise([0, *ends.tolist()]):
        yield token_bytes[start:end]


def splits_like_gpt2(definition: dict[str, Any]) -> bool:
    """Return True if a tokenizer.json splits text as GPT-2 does, with nothing that spans words."""
    model, pre_tokenizer = definition["model"], definition["pre_tokenizer"] or {}
    post_processor = definition["post_processor"]
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and definition["normalizer"] is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer["use_regex"]
        and not pre_tokenizer["add_prefix_space"]
        and (post_processor is None or post_processor["type"] == "ByteLevel")
        and not any(_absorbs_context(token) for token in definition["added_tokens"])
    )


def _absorbs_context(token: dict[str, Any]) -> bool:
    """Return True if a special token absorbs neighbouring characters or contains white space."""
    absorbs_neighbours = token["lstrip"] or token["rstrip"] or token["single_word"]
    return absorbs_neighbours or any(map(str.isspace, token["content"]))


def context_free_pattern(model: bytes) -> re.Pattern[str] | None:
    """Return an expression whose words a sentencepiece model encodes independently of context.

    WORD_PARTS_PATTERN if no piece mixes letters with other characters, otherwise WORDS_PATTERN.
    None if this model does not allow either.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2  # its classes are created at import
    parsed = proto.ModelProto.FromString(model)
    trainer, normalizer = parsed.trainer_spec, parsed.normalizer_spec
    is_context_free = (
        trainer.model_type == proto.TrainerSpec.BPE
        and trainer.byte_fallback  # otherwise neighbouring unknown characters become one token
        and not trainer.treat_whitespace_as_suffix
        and not normalizer.precompiled_charsmap
        and not normalizer.add_dummy_prefix
        and not normalizer.remove_extra_whitespaces
        and normalizer.escape_whitespaces
    )
    if not is_context_free or any(_crosses_word_end(piece.piece) for piece in parsed.pieces):
        return None
    text_types = proto.ModelProto.SentencePiece.NORMAL, proto.ModelProto.SentencePiece.USER_DEFINED
    is_mixed = (
        len(WORD_PARTS_PATTERN.findall(entry.piece)) > 1
        for entry in parsed.pieces
        if entry.type in text_types
    )
    return WORDS_PATTERN if any(is_mixed) else WORD_PARTS_PATTERN


def _crosses_word_end(piece: str) -> bool:
    """Return True if a piece can extend over the end of a word or of a line."""
    inner = piece.lstrip(_SPACE)
    return _SPACE in inner or " " in inner or "\n" in piece
