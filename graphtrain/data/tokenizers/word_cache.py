"""Encoding by words already seen, where a tokenizer makes that exact.

Sentencepiece's byte-pair encoding joins neighbours only into pieces that exist. Where no piece goes
on after a space, and none holds a line break beside something else, no join crosses from a word to
the spaces after it or over the end of a line; words then have the same numbers wherever they are.
Where no piece holds letters beside something else, these parts of a word have, too.

GPT-2's expression cuts every text between a word and a space or line break after it, whatever comes
before and after, and joins stay inside its parts. (Llama 3's takes line breaks to what is before.)

Source: Radford et al. 2019, the expression in https://github.com/openai/gpt-2, src/encoder.py
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

_SPACE = "\u2581"  # sentencepiece's sign for a space
# A word's letters and the rest of it, each with the spaces before.
PARTS = re.compile(f"[ {_SPACE}]*(?:[^\\W\\d_]+|(?:[^\\w {_SPACE}\n]|[\\d_])+)|[ {_SPACE}]+|\n")
PIECES = re.compile(f"\n|[ {_SPACE}]*[^ {_SPACE}\n]+|[ {_SPACE}]+")
# White space that is neither may be none for the other implementation of the expression.
GPT2 = re.compile(r"\s*\S+(?:(?![ \n])\s+(?:\S+|\Z))*|\s+")
_KEPT = 1 << 19  # words; text has few that are frequent and no end of others
_LONGEST = 32  # characters of a word that is kept


class Words:
    """The numbers of words, of a tokenizer for which they are exact."""

    def __init__(
        self,
        expression: re.Pattern[str],
        encode: Callable[[list[str]], Sequence[list[int]]],
        parts: re.Pattern[str] | None = None,
    ) -> None:
        """Cut texts by an expression that takes all of them; encode words that are new.

        With another expression new words are cut again, and only new parts are encoded.
        """
        self._expression = expression
        self._parts = Words(parts, encode) if parts else None
        self._encode = encode
        self._known: dict[str, bytes] = {}  # int32: joined much sooner than lists

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers of each text; those the model itself gives."""
        return [np.frombuffer(each, np.int32) for each in self._bytes(texts)]

    def _bytes(self, texts: Sequence[str]) -> list[bytes]:
        """The same as the bytes of arrays."""
        texts_as_words = [self._expression.findall(text) for text in texts]
        known = self._known
        new = list(set(chain.from_iterable(texts_as_words)).difference(known))
        encoded_words = self._parts._bytes(new) if self._parts else _as_bytes(self._encode(new))
        known.update(zip(new, encoded_words, strict=True))
        encoded = [b"".join(map(known.__getitem__, words)) for words in texts_as_words]
        if len(known) > _KEPT:
            known.clear()
        else:
            for word in new:
                if len(word) > _LONGEST:
                    del known[word]
        return encoded


def _as_bytes(encoded: Sequence[list[int]]) -> Iterator[bytes]:
    """Each of the lists as the bytes of an array."""
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded))) * 4
    numbers = np.fromiter(chain.from_iterable(encoded), np.int32).tobytes()
    for begin, end in pairwise([0, *ends.tolist()]):
        yield numbers[begin:end]


def are_exact_for_gpt2(definition: dict[str, Any]) -> bool:
    """Whether a tokenizer.json cuts as GPT-2 does, and does nothing else that spans words."""
    model, cuts = definition["model"], definition["pre_tokenizer"] or {}
    after = definition["post_processor"]
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and definition["normalizer"] is None
        and cuts.get("type") == "ByteLevel"
        and cuts["use_regex"]
        and not cuts["add_prefix_space"]
        and (after is None or after["type"] == "ByteLevel")
        and not any(_spans(token) for token in definition["added_tokens"])
    )


def _spans(token: dict[str, Any]) -> bool:
    """Whether a special token takes what is around it, or has a space inside."""
    around = token["lstrip"] or token["rstrip"] or token["single_word"]
    return around or any(map(str.isspace, token["content"]))


def exact_words(model: bytes) -> re.Pattern[str] | None:
    """What cuts text into words that a sentencepiece model numbers alike wherever they are.

    PARTS where no piece has letters beside something else, else PIECES; None: nothing does.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    parsed = proto.ModelProto.FromString(model)
    trained, normalizer = parsed.trainer_spec, parsed.normalizer_spec
    plain = (
        trained.model_type == proto.TrainerSpec.BPE
        and trained.byte_fallback  # else unknown characters that are neighbours become one
        and not trained.treat_whitespace_as_suffix
        and not normalizer.precompiled_charsmap
        and not normalizer.add_dummy_prefix
        and not normalizer.remove_extra_whitespaces
        and normalizer.escape_whitespaces
    )
    if not plain or any(_crosses(piece.piece) for piece in parsed.pieces):
        return None
    of_text = proto.ModelProto.SentencePiece.NORMAL, proto.ModelProto.SentencePiece.USER_DEFINED
    mixed = (len(PARTS.findall(one.piece)) > 1 for one in parsed.pieces if one.type in of_text)
    return PIECES if any(mixed) else PARTS


def _crosses(piece: str) -> bool:
    """Whether a piece may reach over the end of a word or of a line."""
    inner = piece.lstrip(_SPACE)
    return _SPACE in inner or " " in inner or "\n" in piece
