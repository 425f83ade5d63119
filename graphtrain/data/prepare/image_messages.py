"""Parsing of conversations with images, in the chat format of transformers."""

from typing import Any, NamedTuple

from graphtrain.data.prepare.conversations import Conversation, Message
from graphtrain.data.prepare.media_keys import media_problem
from graphtrain.errors import DataError

_PATH_KEYS = ("image", "path")  # of a part of type image
_FOREIGN_KEYS = ("url", "base64")


class ImageConversation(NamedTuple):
    """A conversation, and the paths of its images as the record names them, in order."""

    conversation: Conversation
    images: tuple[str, ...]


def read_image_conversation(record: Any, place: str) -> ImageConversation:
    """Return the conversation of a record, whose messages keep the parts of their content.

    Args:
        record: A parsed record: `messages`, each with `role` and `content`: a text, or a list of
            {"type": "text", "text": ...} and {"type": "image", "path": ...}.
        place: File and line, for error messages.

    Raises:
        DataError: the record does not have this format; the message begins with the place.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{place}: has no list of 'messages', the format of conversations with images"
        )
    if (problem := media_problem(record)) is not None:
        raise DataError(f"{place}: {problem}")
    images: list[str] = []
    for index, message in enumerate(messages):
        location = f"{place}: messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{location}: is not an object with a 'role'")
        found = _images_of(message.get("content"), location)
        if found and message["role"] == "assistant":
            raise DataError(
                f"{location}: an assistant message has an image; a model answers with text, so "
                "move the image to a user message"
            )
        images += found
    conversation = Conversation(tuple(map(_with_parts, messages)), record.get("tools"))
    return ImageConversation(conversation, tuple(images))


def check_texts(conversation: Conversation, rendered: str, place: str) -> None:
    """Check that a chat template has written every text, and none as a list of Python.

    Answers are located by the template itself.

    Args:
        conversation: Messages whose content is a list of parts.
        rendered: The text that the template made of them.
        place: File and line, for error messages.

    Raises:
        DataError: it has not; the message begins with the place.
    """
    for index, message in enumerate(conversation.messages):
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        is_lost = message["role"] != "assistant" and any(
            text.strip() not in rendered for text in texts
        )
        if is_lost or (texts and str(message["content"]) in rendered):
            raise DataError(
                f"{place}: messages[{index}]: the chat template does not write its text; use one "
                "that writes the parts of 'content', as that of the model's folder"
            )


def content_text(message: Message) -> str:
    """Return the text of a message whose content is a text, or a list of parts with images."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _with_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts: templates select parts by their type."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def _images_of(content: Any, location: str) -> list[str]:
    """Check the content of a message; return the paths of its images."""
    if isinstance(content, str):
        return []
    if not isinstance(content, list):
        raise DataError(f"{location}: 'content' is neither a text nor a list of parts")
    return [path for part in content if (path := _checked_part(part, location)) is not None]


def _checked_part(part: Message, location: str) -> str | None:
    """Return the path of a part that is an image; None for a text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return None
    if kind != "image":
        raise DataError(
            f"{location}: 'content' has a part of type {kind!r}; only text, with a string 'text', "
            'and image, as {"type": "image", "path": "FILE"}, can be prepared'
        )
    if foreign := [key for key in _FOREIGN_KEYS if part.get(key) is not None]:
        raise DataError(
            f"{location}: an image has a {foreign[0]!r}; save the image as a file and name it with "
            "'path'"
        )
    paths = [part[key] for key in _PATH_KEYS if part.get(key) is not None]
    if len(paths) != 1 or not isinstance(paths[0], str) or not paths[0]:
        raise DataError(f"{location}: an image needs one 'path', a string")
    if "://" in paths[0] or paths[0].startswith("data:"):
        raise DataError(
            f"{location}: the image {paths[0][:80]!r} is not the path of a file; save it as one"
        )
    return paths[0]
