"""Keys of records and messages that name pictures, videos or sounds outside of 'content'."""

from collections.abc import Mapping
from typing import Any

# As LLaVA, LLaMA-Factory, ms-swift and Ollama write them.
_IMAGES = "image", "images"
_OTHERS = "video", "videos", "audio", "audios"


def media_problem(record: Mapping[str, Any]) -> str | None:
    """Say that a record or one of its messages names files that would be left out, and the remedy.

    Keys without a value, as of records of text among others, name nothing.
    """
    messages = record.get("messages") or record.get("conversations") or ()
    parts = [("", record)]
    if isinstance(messages, list):
        parts += [("a message ", message) for message in messages if isinstance(message, dict)]
    for where, part in parts:
        if key := next((key for key in _IMAGES if part.get(key)), None):
            return (
                f"{where}has the key {key!r}, which is not read; write every image as a part of "
                'the \'content\' of its message, {"type": "image", "path": "FILE"}, without a '
                "placeholder in the text, and give --processor FOLDER; or remove the key, to train "
                "on the text alone"
            )
        if key := next((key for key in _OTHERS if part.get(key)), None):
            return f"{where}has the key {key!r}, which cannot be prepared; remove it or the record"
    return None
