"""Interface of tokenizers: text to token ids and back, with a digest that identifies each."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from graphtrain.data.tokenizers.offsets import TokensWithOffsets
from sharding_rules.documents import parse_object

CHAT_TEMPLATE = "chat_template.jinja"  # file next to a tokenizer


class Tokenizer(Protocol):
    """Conversion of text to token ids below `vocab` and back."""

    @property
    def kind(self) -> str:
        """Name of this kind of tokenizer in a dataset's description."""
        ...

    @property
    def vocab(self) -> int:
        """Vocabulary size: every token id is below it."""
        ...

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, if the vocabulary has one."""
        ...

    @property
    def bos(self) -> int | None:
        """Id of the beginning-of-sequence token, if the tokenizer names one."""
        ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts before a text by itself, as transformers does: its BOS."""
        ...

    @property
    def suffix(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts after a text by itself, as transformers does: its EOS."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the tokenizer; equal digests give equal token ids for equal text."""
        ...

    @property
    def special(self) -> Mapping[str, str]:
        """Texts of special tokens by role, such as eos_token, for chat templates."""
        ...

    @property
    def special_texts(self) -> Sequence[str]:
        """Texts that `encode_with_offsets` turns into special tokens."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the tokenizer's own chat template, if it has one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a text to token ids, without adding special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts; return the token ids of each."""
        ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        """Encode to token ids with character offsets; spelled-out special tokens become tokens."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode token ids to text."""
        ...

    def piece_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that may be a part of a character; None if not known."""
        ...

    def save(self, directory: Path) -> tuple[str, ...]:
        """Write the files that `load_tokenizer` reads; return their names, the main one first."""
        ...


def chat_template_of_config(config: bytes | str) -> str | None:
    """Return the chat template in a tokenizer_config.json; of several, the one named default.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: `config` is not a tokenizer_config.json.
    """
    template = parse_object(config).get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
