"""transformers makes of the exported tokenizer of a run what the run was trained with."""

import json
import warnings

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.weights.families import FAMILIES
from graphtrain.weights.tokenizer import describe_tokenizer

TEXTS = ["The function returns", " two  spaces\nand é 数", "def f(x):\n    return x"]
CORPUS = [f"The function number {n} returns def f(x): return x and spaces" for n in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_sentencepiece(CORPUS, 310).save(folder)
    return (folder / "tokenizer.model").read_bytes()


@pytest.mark.parametrize("family", [family.model_type for family in FAMILIES])
def test_a_sentencepiece_model_has_the_same_tokens(family, model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        special = describe_tokenizer(tmp_path, family)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | special))
    needs_another_class = any("PreTrainedTokenizerFast" in str(one.message) for one in caught)
    load = (PreTrainedTokenizerFast if needs_another_class else AutoTokenizer).from_pretrained
    ours, theirs = load_tokenizer(tmp_path), load(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert special == {"bos_token_id": ours.bos, "eos_token_id": ours.eod}
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eod)
