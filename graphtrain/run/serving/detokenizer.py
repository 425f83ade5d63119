"""Incremental detokenization: the text that each generated token adds."""

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[Iterable[int]], str]

_REPLACEMENT = "\ufffd"  # decoders write it for bytes that are no character, yet or ever
_MAX_PENDING = 3  # bytes of a character of UTF-8 without its last one
_MAX_WINDOW = 64  # tokens that are decoded again for each new one
_CONTEXTS = range(6, 16)  # tokens of the prompt before the first generated one


class IncrementalDetokenizer:
    """Text of a sequence that grows token by token.

    A token may hold a part of a character, and its text may depend on the token before it: the
    first word that sentencepiece decodes loses its space. So each new token is decoded together
    with some before it, and characters that are incomplete are held back.

    Args:
        decode: Decoder of a tokenizer.
        prompt: Tokens before the first one that is pushed.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window = _context(decode, prompt)
        self._complete = len(self._window)  # tokens of the window that end with a character
        self._returned = len(decode(self._window))  # characters of the window
        self._held = ""  # text of the window that may change
        self.begin = 0  # characters of the last returned text that tokens before the last one have

    def push(self, token: int) -> str:
        """Return the text that is complete with a token."""
        self._window.append(token)
        text, held = self._decode(self._window), self._held
        self.begin = len(held) if text.startswith(held, self._returned) else 0
        stable = _stable_length(text)
        if stable == len(text) or len(self._window) > _MAX_WINDOW:
            added = text[self._returned :]
            self._start_window(self._window[self._complete :] if stable == len(text) else [token])
            return added
        added = text[self._returned : stable]
        self._returned = max(self._returned, stable)
        self._held, self.begin = text[self._returned :], min(self.begin, len(added))
        return added

    def finish(self) -> str:
        """Return the text that was held back; bytes that are no character are U+FFFD."""
        rest = self._decode(self._window)[self._returned :]
        self._start_window([])
        return rest

    def _start_window(self, tokens: list[int]) -> None:
        self._window, self._complete, self._held = tokens, len(tokens), ""
        self._returned = len(self._decode(tokens))


def _stable_length(text: str) -> int:
    """Return the number of characters that further tokens do not change."""
    complete = len(text.rstrip(_REPLACEMENT))
    return max(complete, len(text) - _MAX_PENDING)


def _context(decode: Decode, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt that are characters; none if it ends in the midst of one.

    The text of such a prompt is complete without the bytes that follow.
    """
    for count in _CONTEXTS:
        context = list(prompt[-count:])
        if _REPLACEMENT not in decode(context):
            return context
    return []
