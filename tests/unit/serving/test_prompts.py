"""Raw prompts as tokens: a special token that is spelled out is that token."""

import pytest

from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.data.tokenizers.characters import train_characters
from graphtrain.data.tokenizers.huggingface import train_bpe
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.run.prompt import encode_prompt

TEXT = "one two three, and a word"
TOKENIZERS = {
    "bytes": ByteTokenizer,
    "chars": lambda: train_characters([TEXT]),
    "bpe": lambda: train_bpe([TEXT], 300, ["<|im_end|>"]),
    "sentencepiece": lambda: train_sentencepiece([TEXT] * 20, 280),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_spelled_special_tokens_of_a_raw_prompt_are_tokens(name):
    tokenizer = TOKENIZERS[name]()
    eod = tokenizer.special["eos_token"]
    begin, end = tokenizer.encode("one"), tokenizer.encode("two")
    assert encode_prompt(tokenizer, f"one{eod}two", ()) == [*begin, tokenizer.eod, *end]
    assert encode_prompt(tokenizer, f"{eod}one", (tokenizer.eod,)) == [tokenizer.eod, *begin]
    assert encode_prompt(tokenizer, "one", ()) == begin


def test_the_unknown_piece_of_sentencepiece_is_special_too():
    tokenizer = TOKENIZERS["sentencepiece"]()
    assert set(tokenizer.special_texts) == {
        "<s>", "</s>", "<unk>",
    }  # fmt: skip
    assert encode_prompt(tokenizer, "<unk>", ()) == [0]
