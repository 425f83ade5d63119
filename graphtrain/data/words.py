"""Encoding by words already seen, where a sentencepiece model makes that exact.

Byte-pair encoding joins neighbours only into pieces that exist. Where no piece goes on after a
space, and none holds a line break beside something else, no join crosses from a word to the spaces
after it or over the end of a line; words then have the same numbers wherever they are.
"""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

_SPACE = "\u2581"  # sentencepiece's sign for a space
_WORD = re.compile(f"\n|[ {_SPACE}]*[^ {_SPACE}\n]+|[ {_SPACE}]+")
_KEPT = 1 << 19  # words; text has few that are frequent and no end of others
_LONGEST = 32  # characters of a word that is kept


class Words:
    """The numbers of words, of a model for which `are_exact` holds."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._known: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers of each text; those the model itself gives."""
        texts_as_words = [_WORD.findall(text) for text in texts]
        known = self._known
        new = list(set(chain.from_iterable(texts_as_words)).difference(known))
        known.update(zip(new, self._processor.encode(new, num_threads=1), strict=True))
        encoded = [
            np.fromiter(chain.from_iterable(map(known.__getitem__, words)), np.int32)
            for words in texts_as_words
        ]
        if len(known) > _KEPT:
            known.clear()
        else:
            for word in new:
                if len(word) > _LONGEST:
                    del known[word]
        return encoded


def are_exact(model: bytes) -> bool:
    """Whether a serialized model gives every word the same numbers wherever it is."""
    from sentencepiece import sentencepiece_model_pb2 as proto

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
    return plain and not any(_crosses(piece.piece) for piece in parsed.pieces)


def _crosses(piece: str) -> bool:
    """Whether a piece may reach over the end of a word or of a line."""
    inner = piece.lstrip(_SPACE)
    return _SPACE in inner or " " in inner or "\n" in piece
