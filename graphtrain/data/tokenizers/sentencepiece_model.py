"""Tokenizers of the sentencepiece library."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.tokenizers.offsets import (
    TokensWithOffsets,
    character_offsets,
    encode_with_special_tokens,
)
from graphtrain.data.tokenizers.piece_bytes import byte_of_piece
from graphtrain.data.tokenizers.special_tokens import (
    TOKENIZER_CONFIG,
    added_bos,
    read_companion,
)
from graphtrain.data.tokenizers.word_cache import (
    WORD_PARTS_PATTERN,
    WORDS_PATTERN,
    WordCache,
    context_free_pattern,
)
from graphtrain.errors import DataError
from graphtrain.files import atomic_write


class SentencePieceTokenizer:
    """Sentencepiece model; `eod` is its end-of-sentence piece, unless another is named.

    A model adds no token to a text, as in transformers 5, unless a tokenizer_config.json next to it
    sets add_bos_token.

    Args:
        model: Content of the model file.
        name: Path for error messages.
        eod: Text of the end-of-document piece. None: the model's own.
        config: Content of the tokenizer_config.json, which is copied when the tokenizer is saved.

    Raises:
        DataError: the bytes are not a sentencepiece model, or it has no piece `eod`.
    """

    kind = "sentencepiece"
    chat_template = None  # a template file next to the model must be named by its path

    def __init__(
        self,
        model: bytes,
        name: str = "tokenizer.model",
        eod: str | None = None,
        config: bytes | None = None,
    ) -> None:
        import sentencepiece

        self._model, self._name, self._end, self._config = model, name, eod, config
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, UnicodeDecodeError) as error:  # the second from a damaged message
            raise DataError(f"{name}: not a sentencepiece model ({str(error)[:200]})") from None
        self._words: WordCache | None = None
        self.vocab: int = self._processor.vocab_size()
        end = self._processor.eos_id() if eod is None else self._processor.piece_to_id(eod)
        if (
            eod is not None and self._processor.id_to_piece(end) != eod
        ):  # unknown pieces map to <unk>
            raise DataError(f"{name}: has no piece {eod!r}; name another one with --eod-token")
        self.eod: int | None = end if end >= 0 else None
        begin = self._processor.bos_id()
        self.bos: int | None = begin if begin >= 0 else None
        self.prefix, self.suffix = self._prefix(), self._suffix()
        self.digest = hashlib.sha256(model).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceTokenizer, (self._model, self._name, self._end, self._config)

    def _prefix(self) -> tuple[int, ...]:
        """Return the BOS that the tokenizer_config.json adds, if it is a piece of the model."""
        if self._config is None or self.bos is None:
            return ()
        piece = added_bos(
            self._config, TOKENIZER_CONFIG, default=self._processor.id_to_piece(self.bos)
        )
        token_id = self.bos if piece is None else self._processor.piece_to_id(piece)
        is_piece = piece is not None and self._processor.id_to_piece(token_id) == piece
        return (token_id,) if is_piece else ()

    def _suffix(self) -> tuple[int, ...]:
        """Return the EOS that the tokenizer_config.json adds."""
        fields = {} if self._config is None else read_companion(self._config, TOKENIZER_CONFIG)
        if self.eod is None or fields.get("add_eos_token") is not True:
            return ()
        return (self.eod,)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._words is None and (expression := context_free_pattern(self._model)):
            encode = partial(self._processor.encode, num_threads=1)
            self._words = WordCache(
                WORDS_PATTERN,
                encode,
                WORD_PARTS_PATTERN if expression is WORD_PARTS_PATTERN else None,
            )
        if self._words is not None:
            return self._words.encode(texts)
        # One thread: parallelism comes from worker processes.
        encoded = self._processor.encode(list(texts), num_threads=1)
        return [np.array(tokens, np.int32) for tokens in encoded]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        token_id = self._processor.piece_to_id
        return [
            encode_with_special_tokens(
                text, self._control_pieces, token_id, self._encode_with_offsets
            )
            for text in texts
        ]

    @property
    def special(self) -> Mapping[str, str]:
        special_ids = ("bos_token", self._processor.bos_id()), ("eos_token", self.eod)
        return {
            name: self._processor.id_to_piece(token_id)
            for name, token_id in special_ids
            if token_id is not None and token_id >= 0
        }

    @property
    def special_texts(self) -> Sequence[str]:
        """Control pieces and the unknown one, which sentencepiece never produces from these texts.

        They are special tokens in transformers.
        """
        return self._special_texts

    @cached_property
    def _special_texts(self) -> Sequence[str]:
        processor = self._processor
        ids = (n for n in range(self.vocab) if processor.is_control(n) or processor.is_unknown(n))
        return sorted(map(processor.id_to_piece, ids), key=len, reverse=True)

    @cached_property
    def _control_pieces(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special_texts)) or "(?!)")

    def _encode_with_offsets(self, text: str) -> TokensWithOffsets:
        from sentencepiece import sentencepiece_pb2

        proto: Any = sentencepiece_pb2  # its classes are created at import
        encoded = self._processor.encode(text, out_type="serialized_proto")
        pieces = proto.SentencePieceText.FromString(encoded).pieces
        starts = np.array([piece.begin for piece in pieces], np.int64)
        ends = np.array([piece.end for piece in pieces], np.int64)
        for index in reversed(range(len(pieces) - 1)):
            if ends[index] == starts[index]:  # byte piece of a character, not its last one
                ends[index] = ends[index + 1]
        char_offsets = character_offsets(text.encode())
        return TokensWithOffsets(
            np.array([piece.id for piece in pieces], np.int32),
            char_offsets[starts],
            char_offsets[ends],
        )

    def decode(self, tokens: Iterable[int]) -> str:
        return self._processor.decode([int(token) for token in tokens])

    def piece_bytes(self, token: int) -> bytes | None:
        return byte_of_piece(self._processor.id_to_piece(token))

    def save(self, directory: Path) -> tuple[str, ...]:
        files = {"tokenizer.model": self._model}
        if self._config is not None:
            files[TOKENIZER_CONFIG] = self._config
        for name, content in files.items():
            with atomic_write(directory / name) as file:
                file.write(content)
        return tuple(files)
