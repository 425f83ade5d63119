"""Fields of answers."""

from types import SimpleNamespace
from typing import Any

from graphtrain.run.serving.http.responses import Answer


def test_offsets_of_a_prompt_point_into_its_text():
    """Also after characters of several tokens, here of bytes."""
    tokenizer: Any = SimpleNamespace(decode=lambda tokens: bytes(tokens).decode(errors="replace"))
    answer = Answer("text_completion", "a", tokenizer)
    text = "日本 the"
    tokens = list(text.encode())
    offsets = answer.prompt_logprobs(tokens, [None] * len(tokens), 0)["text_offset"]
    assert offsets == [0, 0, 0, 1, 1, 1, 2, 3, 4, 5]
    assert text[offsets[-3] :] == "the"
