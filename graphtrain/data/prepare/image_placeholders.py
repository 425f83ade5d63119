"""Placeholders of images in the text and the tokens of a conversation."""

import re
from bisect import bisect_left

import numpy as np

from graphtrain.data.prepare.chat_templates import Rendered
from graphtrain.errors import DataError


def repeat_placeholders(
    rendered: Rendered, token: str, tokens: int, images: int, place: str
) -> Rendered:
    """Write the placeholder of each image as often as the image has tokens.

    Args:
        rendered: A conversation, with one placeholder for each image.
        token: Text of the placeholder.
        tokens: Tokens of an image.
        images: Images of the conversation.
        place: File and line, for error messages.

    Raises:
        DataError: the text has another number of placeholders than images.
    """
    starts = [match.start() for match in re.finditer(re.escape(token), rendered.text)]
    if len(starts) != images:
        raise DataError(
            f"{place}: its text has {len(starts)} times {token}, the placeholder of an image, but "
            f"the record has {images} images; a text must not spell it out, and the chat template "
            "must write it once for each image"
        )
    added = (tokens - 1) * len(token)

    def moved(position: int) -> int:
        return position + added * bisect_left(starts, position)

    text = rendered.text.replace(token, token * tokens)
    return Rendered(text, [(moved(start), moved(end)) for start, end in rendered.spans])


def without_placeholders(spans: np.ndarray, tokens: np.ndarray, placeholder: int) -> np.ndarray:
    """Leave placeholders out of the spans to train on.

    Args:
        spans: Begin and end of each span, in tokens: (2 * spans,).
        tokens: Tokens of the document.
        placeholder: Id of the placeholder.
    """
    is_learned = np.zeros(len(tokens) + 2, bool)  # with one more on both sides
    for start, end in spans.reshape(-1, 2):
        is_learned[start + 1 : end + 1] = True
    is_learned[1:-1] &= tokens != placeholder
    return np.flatnonzero(np.diff(is_learned)).astype(np.int32)
