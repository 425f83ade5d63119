"""Stop strings: a text ends before the first of them, wherever tokens cut it."""

from collections.abc import Sequence


class StopStrings:
    """Filter of a text that grows; holds back what may become a stop string.

    Args:
        strings: Stop strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is released, and whether it ended before a stop string."""
        text = self._held + text
        found = [index for stop in self._strings if (index := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        begin = len(text) - max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[begin:]
        return text[:begin], False

    def finish(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
