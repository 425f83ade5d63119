import io

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.tokenizers import word_cache
from graphtrain.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.data.tokenizers.word_cache import (
    WORD_PARTS_PATTERN,
    WORDS_PATTERN,
    context_free_pattern,
)

TEXTS = [
    "the quick brown fox\n    jumps over the lazy dog 123\n" * 3,
    "def f(x):\n\treturn x  +  1\n",
] * 9
LETTERS = "theqikbown fjmpsvrlazydg \u2581\n\t123()é\u3000\0日_²\u0301"


@pytest.fixture(scope="module")
def learned():
    return train_sentencepiece(TEXTS, 300, ["<|end|>"])


@pytest.fixture(scope="module")
def plain():
    """Without a piece that has letters beside something else."""
    return train_sentencepiece([text.replace("_", " ") for text in TEXTS], 300)


@given(texts=st.lists(st.text(LETTERS) | st.text(st.characters(exclude_categories=["Cs"]))))
@settings(max_examples=300, deadline=None)
def test_words_have_the_numbers_of_the_model(learned, plain, texts):
    texts = [*texts, *(f"{text}<|end|> {text}" for text in texts)]
    for tokenizer in (learned, plain):
        model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer._model)
        assert [each.tolist() for each in tokenizer.encode_batch(texts)] == [
            model.encode(text) for text in texts
        ]


def test_parts_of_words_are_taken_where_no_piece_mixes_them(learned, plain):
    assert context_free_pattern(learned._model) is WORDS_PATTERN  # <|end|>
    assert context_free_pattern(plain._model) is WORD_PARTS_PATTERN


def test_words_are_kept_within_bounds(learned, monkeypatch):
    monkeypatch.setattr(word_cache, "_MAX_CACHED_WORDS", 10)
    tokenizer = SentencePieceTokenizer(learned._model)
    for start in range(5):
        text = " ".join(f"w{start}{i}" for i in range(8)) + " " + "x" * 100
        assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text)
    assert tokenizer._words is not None
    assert len(tokenizer._words._known) <= 10
    assert all(len(word) <= 32 for word in tokenizer._words._known)


@pytest.mark.parametrize(
    "setting",
    [
        {"split_by_whitespace": False},
        {"add_dummy_prefix": True},
        {"model_type": "unigram"},
        {"byte_fallback": False},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"treat_whitespace_as_suffix": True},
        {"user_defined_symbols": ["a b"]},
    ],
)
def test_other_models_encode_whole_texts(setting):
    model = io.BytesIO()
    defaults = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 5),
        model_writer=model,
        vocab_size=310,
        hard_vocab_limit=False,
        minloglevel=2,
        **defaults | setting,
    )
    assert context_free_pattern(model.getvalue()) is None
    assert SentencePieceTokenizer(model.getvalue()).encode_batch(["a b"])[0].tolist()
