"""Fields of answers."""

import pytest

from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.data.tokenizers.huggingface import train_bpe
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.run.serving.engine_protocol import TokenChoice
from graphtrain.run.serving.http.responses import Answer
from graphtrain.run.serving.sequence import TextToken

TEXT = "the cat sat on the mat"
TOKENIZERS = {
    "bytes": ByteTokenizer,
    "bpe": lambda: train_bpe([TEXT], 300),
    "sentencepiece": lambda: train_sentencepiece([TEXT] * 20, 280),
}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("日本 the".encode(), [0, 0, 0, 1, 1, 1, 2, 3, 4, 5]),  # characters of several tokens
        (b"a\xe6\x97bc", [0, 1, 1, 2, 3]),  # a part of a character is U+FFFD
    ],
)
def test_offsets_of_a_prompt_point_into_its_text(data, expected):
    answer, tokens = Answer("text_completion", "a", ByteTokenizer()), list(data)
    offsets = answer.prompt_logprobs(tokens, [None] * len(tokens), 0)["text_offset"]
    assert offsets == expected
    text = data.decode(errors="replace")
    assert text[offsets[-2]] == chr(data[-2])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_parts_of_characters_keep_their_bytes(name):
    """The log-probabilities of two parts, whose text is the same, are both reported."""
    tokenizer = TOKENIZERS[name]()
    parts = tokenizer.encode("🦀")[-4:]  # of one byte each
    assert tokenizer.decode(parts) == "🦀" and len(set(parts)) == 4
    choice = TokenChoice(parts[0], -1.0, tuple((part, -1.0 - n) for n, part in enumerate(parts)))
    tokens = [TextToken(choice, 0)]
    labels = ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x80"]
    completion = Answer("text_completion", "a", tokenizer).completion_logprobs(tokens, 4)
    assert completion["tokens"] == labels[:1]
    assert completion["top_logprobs"] == [dict(zip(labels, [-1, -2, -3, -4], strict=True))]
    chat = Answer("chat.completion", "a", tokenizer).chat_logprobs(tokens, 4)["content"][0]
    assert chat["bytes"] == [0xF0]
    assert [top["bytes"] for top in chat["top_logprobs"]] == [[0xF0], [0x9F], [0xA6], [0x80]]


def test_a_token_without_text_has_a_list_of_no_bytes():
    """A stop string may begin with the token; rows beyond the tokenizer's tokens have no text."""
    tokenizer = ByteTokenizer()
    choice = TokenChoice(97, -1.0, ((tokenizer.vocab + 5, -0.5),))
    answer = Answer("chat.completion", "a", tokenizer)
    [chat] = answer.chat_logprobs([TextToken(choice, 0, cut_text="")], 1)["content"]
    assert chat["bytes"] == [] and chat["top_logprobs"][0]["bytes"] == []
