"""Keys of records and messages that name pictures, videos or sounds outside of 'content'."""

from collections.abc import Iterator, Mapping
from typing import Any

# As LLaVA, LLaMA-Factory, ms-swift and Ollama write them.
_IMAGES = "image", "images"
_OTHERS = "video", "videos", "audio", "audios"
_OF_MESSAGES = "messages", "conversations", "prompt", "chosen", "rejected"


def media_problem(record: Mapping[str, Any], *, is_prompt: bool = False) -> str | None:
    """Say that a record or one of its messages names files that would be left out, and the remedy.

    Keys without a value, as records of text among others have them, name nothing.

    Args:
        record: A parsed record.
        is_prompt: The record is to be answered by a model, not prepared as data.
    """
    for where, part in _parts(record):
        key = next((key for key in (*_IMAGES, *_OTHERS) if part.get(key)), None)
        if key is None:
            continue
        if is_prompt:
            return (
                f"{where}has the key {key!r}, which is not read: models answer text alone here; "
                "remove the key"
            )
        if key in _OTHERS:
            return f"{where}has the key {key!r}, which cannot be prepared; remove it or the record"
        return (
            f"{where}has the key {key!r}, which is not read; write every image as a part of "
            'the \'content\' of its message, {"type": "image", "path": "FILE"}, without a '
            "placeholder in the text, and give --processor FOLDER; or remove the key, to train "
            "on the text alone"
        )
    return None


def _parts(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a record and its messages, each with words that say where it is."""
    yield "", record
    for name in _OF_MESSAGES:
        value = record.get(name)
        for message in value if isinstance(value, list) else [value]:
            if isinstance(message, dict):
                yield f"a message of {name!r} ", message
