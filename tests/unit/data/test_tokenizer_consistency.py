"""A tokenizer.json that contradicts itself is refused; one that does not fit a model is told."""

import json

import pytest

from graphtrain.data.tokenizers.consistency import check_tokenizer, vocabulary_problem
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.train import train_tokenizer
from graphtrain.errors import DataError


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.jsonl").write_text(json.dumps({"text": "a small text of words " * 30}))
    train_tokenizer([folder / "a.jsonl"], folder, "bpe", 270)
    return (folder / "tokenizer.json").read_text()


def changed(sound, change):
    contents = json.loads(sound)
    change(contents)
    return json.dumps(contents).encode()


def set_id(token, token_id):
    return lambda contents: contents["model"]["vocab"].__setitem__(token, token_id)


def add(**token):
    return lambda contents: contents["added_tokens"].append(token)


def swap_a_merge(contents):
    contents["model"]["merges"][0] = ["q", "z"]


def drop_a_token(contents):
    last = contents["model"]["merges"][-1]
    del contents["model"]["vocab"]["".join(last)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_id("a", 5), "both have id 5"),
        (set_id("a", 2**31), "token 'a' has the id 2147483648"),
        (set_id("a", -1), "token 'a' has the id -1"),
        (set_id("a", "7"), "token 'a' has the id '7'"),
        (add(content="new", id=7), "and 'new' both have id 7"),
        (add(content="a", id=900), "token 'a' has id .* in the vocabulary and id 900 among"),
        (swap_a_merge, "a merge needs the token 'qz'"),
        (drop_a_token, "a merge needs the token"),
        (lambda contents: contents.pop("model"), "the entry 'model' is missing"),
        (lambda contents: contents.update(added_tokens=5), "an entry has another type"),
    ],
)
def test_a_contradiction_is_refused_and_named(sound, change, message, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(changed(sound, change))
    with pytest.raises(
        DataError, match=f"tokenizer.json: not a tokenizer, or damaged: .*{message}"
    ):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_flipped_digit_of_an_id_is_found_always(sound):
    vocab = json.loads(sound)["model"]["vocab"]
    for token, token_id in list(vocab.items())[::7]:
        damaged = changed(sound, set_id(token, token_id ^ 1))
        with pytest.raises(
            DataError, match=r"both have id|no token has id|in the vocabulary and id"
        ):
            check_tokenizer(damaged, "tokenizer.json")
            raise DataError(vocabulary_problem(damaged, 270))


def test_ids_are_compared_with_the_embedding(sound):
    size = max(json.loads(sound)["model"]["vocab"].values()) + 1
    assert vocabulary_problem(sound.encode(), size) is None
    assert vocabulary_problem(sound.encode(), size + 50) is None  # padding
    assert "but the embedding has" in vocabulary_problem(sound.encode(), size - 1)
    gap = changed(sound, set_id("a", size + 3))
    assert "no token has id" in vocabulary_problem(gap, size + 10)


def test_pieces_of_a_unigram_model_are_their_ids():
    model = {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.5]]}
    good = json.dumps({"model": model, "added_tokens": [{"content": "b", "id": 1}]}).encode()
    check_tokenizer(good, "tokenizer.json")
    assert vocabulary_problem(good, 2) is None
