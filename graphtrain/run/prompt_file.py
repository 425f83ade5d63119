"""Prompts as lines of JSON: texts to continue, and conversations to answer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.data.prepare.conversations import Conversation, read_conversations
from graphtrain.errors import DataError
from sharding_rules.documents import DocumentError, parse_json

_FORMS = 'a JSON string, or an object with "prompt" (a string) or "messages" (a list)'


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    content: str | Conversation
    place: str  # where it is written, for messages


def read_prompt_file(path: Path) -> list[Prompt]:
    """Return the prompts of a file of JSON lines; `-` is standard input.

    Raises:
        DataError: the file cannot be read, or a line is no prompt.
    """
    if str(path) == "-":
        return read_prompts(sys.stdin.buffer, "standard input")
    try:
        with path.open("rb") as file:
            return read_prompts(file, str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def read_prompts(lines: Iterable[bytes], name: str) -> list[Prompt]:
    """Return the prompts of a file of JSON lines; empty lines are skipped.

    Args:
        lines: Lines of the file.
        name: Name of the file, for messages.

    Raises:
        DataError: a line is no prompt, or there is none; names the line.
    """
    prompts = [
        parse_prompt(_parsed(line, f"{name}:{number}"), f"{name}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise DataError(f"{name} has no prompts; each line is {_FORMS}")
    return prompts


def parse_prompt(value: Any, place: str) -> Prompt:
    """Return the prompt that a JSON value states; other keys of an object are ignored.

    Raises:
        DataError: it states none, or both a text and a conversation.
    """
    if isinstance(value, dict) and ("prompt" in value) != ("messages" in value):
        if "messages" in value:
            (conversation,) = read_conversations(value, "messages", place, is_prompt=True)
            return Prompt(conversation, place)
        value = value["prompt"]
    if not isinstance(value, str):
        raise DataError(f"{place}: not {_FORMS}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{place}: the prompt has half a surrogate pair, which is no text"
        ) from None
    return Prompt(value, place)


def _parsed(line: bytes, place: str) -> Any:
    try:
        return parse_json(line)
    except DocumentError as error:
        raise DataError(f"{place}: not JSON ({error})") from None
