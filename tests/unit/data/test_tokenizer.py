import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.prepare.text import prepare
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.data.tokenizers.characters import MAX_CHARACTERS, train_characters
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.errors import DataError

TEXTS = [
    "the quick brown fox\n    jumps over the lazy dog 123\n" * 3,
    "def f(x):\n\treturn x\n",
] * 9
unicode = st.text(st.characters(exclude_categories=["Cs"]).filter(lambda c: c not in "\u2581\0"))


@pytest.fixture(scope="module")
def learned():
    return train_sentencepiece(TEXTS, 300)


@given(text=unicode)
@settings(max_examples=100, deadline=None)
def test_text_comes_back_as_it_was(learned, text):
    for tokenizer in (ByteTokenizer(), learned):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.encode_batch([text, "x"])[0].tolist() == tokens
        assert all(0 <= token < tokenizer.vocab for token in tokens)


def test_bytes_end_documents_with_256_which_is_no_text():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([104, 105, 256]) == "hi"


def test_the_same_text_teaches_the_same_model(learned):
    assert train_sentencepiece(iter(TEXTS), 300).digest == learned.digest
    assert train_sentencepiece(TEXTS, 299).digest != learned.digest


def test_a_learned_tokenizer_is_saved_loaded_and_pickled(learned, tmp_path):
    (name,) = learned.save(tmp_path)
    loaded = load_tokenizer(tmp_path / name)
    copied = pickle.loads(pickle.dumps(learned))
    assert loaded.digest == copied.digest == learned.digest
    assert loaded.encode("the fox") == copied.encode("the fox") == learned.encode("the fox")
    assert (loaded.vocab, loaded.eod) == (300, 2)


@pytest.mark.parametrize(
    ("texts", "vocab", "remedy"),
    [
        (["a b"], 5000, "give more text, or choose a smaller size"),
        ([], 300, "give more text"),
        (["abc"], 65, "need 260, and the 3 characters of the text one each; use 263 or more, or"),
    ],
)
def test_text_that_does_not_fit_the_vocabulary_says_so(texts, vocab, remedy):
    with pytest.raises(DataError, match=rf"cannot train {vocab} pieces from \d+ lines.*{remedy}"):
        train_sentencepiece(texts, vocab)


def test_an_error_in_the_texts_is_raised_as_it_is():
    def texts():
        yield "some text"
        raise DataError("corpus.jsonl: line 2")

    with pytest.raises(DataError, match=r"^corpus.jsonl: line 2$"):
        train_sentencepiece(texts(), 300)


def test_sentencepiece_says_nothing_on_the_terminal(capfd):
    train_sentencepiece(TEXTS, 300)
    assert capfd.readouterr() == ("", "")


def test_tokenizers_that_cannot_be_loaded_say_why(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"bad\.model: not a sentencepiece model"):
        load_tokenizer(tmp_path / "bad.model")
    with pytest.raises(DataError, match=r"absent\.model: No such file"):
        load_tokenizer(tmp_path / "absent.model")
    with pytest.raises(
        DataError, match=r"unknown tokenizer 'gpt2'; use bytes, chars, FILE\.model, tokenizer"
    ):
        load_tokenizer("gpt2")


@given(text=unicode, other=unicode)
@settings(max_examples=50, deadline=None)
def test_characters_of_the_training_text_come_back(text, other):
    tokenizer = train_characters([text, "ab"])
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([*tokens, tokenizer.eod]) == text
    assert tokenizer.encode_batch(["", text])[1].tolist() == tokens
    known = {*text, "a", "b"}
    want = "".join(character if character in known else "\ufffd" for character in other)
    assert tokenizer.decode(tokenizer.encode(other)) == want


def test_characters_are_saved_loaded_and_pickled(tmp_path):
    tokenizer = train_characters(["hello", "wörld"])
    (name,) = tokenizer.save(tmp_path)
    loaded, copied = load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))
    assert name == "tokenizer.chars"
    assert loaded.digest == copied.digest == tokenizer.digest
    assert loaded.encode("low") == copied.encode("low") == tokenizer.encode("low")
    assert (loaded.vocab, loaded.eod) == (10, 8)
    (offsets,) = loaded.encode_with_offsets(["lo<|endoftext|>"])
    assert offsets.tokens.tolist() == [*tokenizer.encode("lo"), 8]
    (tmp_path / name).write_text('{"characters": "ba"}')
    with pytest.raises(DataError, match="not a tokenizer of characters"):
        load_tokenizer(tmp_path)


def test_too_many_characters_are_refused_with_another_tokenizer():
    text = "".join(map(chr, range(0x4E00, 0x4E00 + MAX_CHARACTERS + 1)))
    with pytest.raises(DataError, match=r"10,001 different characters.*bytes or sentencepiece"):
        train_characters([text])
    with pytest.raises(DataError, match="training text is empty"):
        train_characters([""])


def test_a_damaged_model_is_read_or_refused(learned, tmp_path):
    (name,) = learned.save(tmp_path)
    model = (tmp_path / name).read_bytes()
    messages = []
    for position in range(0, 2000, 3):  # the pieces, some of which are no UTF-8 then
        flipped = bytearray(model)
        flipped[position] ^= 0x80
        (tmp_path / name).write_bytes(flipped)
        try:
            load_tokenizer(tmp_path / name)
        except DataError as error:
            messages.append(str(error))
    assert messages and all("not a sentencepiece model" in message for message in messages)


def test_a_dataset_of_bytes_as_a_tokenizer_says_what_to_pass(make_corpus, tmp_path):
    prepare([make_corpus(["one", "two"])], tmp_path / "d", "bytes", validation=0)
    with pytest.raises(DataError, match=r"contains a dataset: .* pass --tokenizer bytes"):
        load_tokenizer(tmp_path / "d")
