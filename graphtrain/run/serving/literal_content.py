"""Contents of chat messages as ordinary text: special tokens spelled out in them stay text.

A template and its tokenizer turn every spelled-out special token into that token, as in
`apply_chat_template`. The client of a server could then end its own turn and write that of another
role. So a mark is put into each of them before the template is rendered, and the tokens of the
marks are dropped.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from graphtrain.data.prepare.conversations import Conversation
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError

_MARK = "\ufdd2"  # Unicode noncharacter: never part of a text


class LiteralContent:
    """Conversations with marks in special tokens, and tokens of the rendered text without them.

    Args:
        tokenizer: Tokenizer of the rendered text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spelled = "|".join(map(re.escape, tokenizer.special_texts))
        # A mark follows the first character, also where special tokens overlap.
        self._pattern = re.compile(f"(?=(?:{spelled or '(?!)'}))(.)", re.DOTALL)

    def mark(self, conversation: Conversation) -> Conversation:
        """Return a conversation whose messages and tools spell no special token.

        Raises:
            DataError: a text contains the mark.
        """
        messages = tuple(self._marked(message) for message in conversation.messages)
        return replace(conversation, messages=messages, tools=self._marked(conversation.tools))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text, without those of the marks."""
        (encoded,) = self._tokenizer.encode_with_offsets([text])
        characters = np.frombuffer(f"{text}\0".encode("utf-32-le"), np.uint32)
        is_mark = (encoded.ends - encoded.begins == 1) & (characters[encoded.begins] == ord(_MARK))
        return encoded.tokens[~is_mark].tolist()

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            if _MARK in value:
                raise DataError("contains U+FDD2, which is not a Unicode character")
            return self._pattern.sub(rf"\1{_MARK}", value)
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return value
