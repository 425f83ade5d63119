import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import dataset_tokenizer
from graphtrain.data.prepare.text import prepare
from graphtrain.data.tokenizers.huggingface import HuggingFaceTokenizer, train_bpe
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.train import train_tokenizer
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.errors import DataError

TEXTS = [
    "the quick brown fox\n    jumps over the lazy dog 123\n" * 3,
    "def f(x):\n\treturn x\n",
] * 9
SPECIAL = ("<|im_start|>", "<|im_end|>")
unicode = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def learned():
    return train_bpe(TEXTS, 300, SPECIAL)


@given(text=unicode)
@settings(max_examples=100, deadline=None)
def test_text_comes_back_as_it_was(learned, text):
    tokens = learned.encode(text)
    assert learned.decode(tokens) == text
    assert learned.encode_batch([text, "x"])[0].tolist() == tokens
    assert all(0 <= token < learned.vocab for token in tokens)


@given(
    texts=st.lists(
        unicode | st.text("the fox,.'sS \n\t\r\x1c\x85\xa0\u20031é日") | st.just(SPECIAL[0])
    )
)
@settings(max_examples=400, deadline=None)
def test_words_have_the_numbers_of_whole_texts(learned, texts):
    assert learned._words is not None
    texts = [*texts, "".join(texts), " ".join(texts)]
    assert [each.tolist() for each in learned.encode_batch(texts)] == [
        learned.encode(text) for text in texts
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
        lambda d: d["pre_tokenizer"].update(use_regex=False),
        lambda d: d.update(pre_tokenizer=None),
        lambda d: d.update(normalizer={"type": "NFC"}),
        lambda d: d["added_tokens"][1].update(lstrip=True),
        lambda d: d["added_tokens"][1].update(content="<im start>"),
    ],
)
def test_other_tokenizers_encode_whole_texts(learned, change):
    definition = json.loads(learned._definition)
    change(definition)
    other = HuggingFaceTokenizer(json.dumps(definition).encode())
    assert other._words is None
    assert other.encode_batch(["the fox\n jumps"])[0].tolist() == other.encode("the fox\n jumps")


def test_special_tokens_are_one_token_each_and_end_documents(learned):
    assert learned.encode("<|im_start|>the<|im_end|>")[0] == 1
    assert learned.encode("<|im_end|>") == [2]
    assert (learned.eod, learned.decode([0, 2])) == (0, "<|endoftext|><|im_end|>")
    pieces = train_sentencepiece(TEXTS, 300, SPECIAL)
    assert len(pieces.encode("<|im_end|>")) == 1
    assert pieces.decode(pieces.encode("the<|im_end|>")) == "the<|im_end|>"


def test_a_folder_keeps_its_companions_and_its_end_of_sequence(learned, tmp_path):
    learned.save(tmp_path / "model")
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages }}"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.eod == 2
    assert tokenizer.digest == learned.digest
    names = tokenizer.save(tmp_path / "copy")
    assert names == ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert (copied.eod, copied.encode("the fox")) == (2, learned.encode("the fox"))
    assert load_tokenizer(tmp_path / "model", "<|im_start|>").eod == 1


def test_tokens_are_those_of_transformers(learned, tmp_path):
    transformers = pytest.importorskip("transformers")
    learned.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.eos_token_id == learned.eod
    for text in (*TEXTS, "<|im_start|>été 日本<|im_end|>", " two  spaces "):
        assert learned.encode(text) == theirs(text).input_ids


def test_the_two_files_of_gpt2_are_the_same_tokenizer(learned, tmp_path):
    model = json.loads((tmp_path / learned.save(tmp_path)[0]).read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    for spec in (tmp_path, f"{tmp_path / 'vocab.json'},{tmp_path / 'merges.txt'}"):
        read = load_tokenizer(spec)
        assert (read.vocab, read.eod) == (300, 0)
        for text in (*TEXTS, "the<|endoftext|>fox", "日本"):
            assert read.encode(text) == learned.encode(text)
            assert read.decode(read.encode(text)) == text


def test_prepare_takes_them_with_workers_and_reads_them_back(
    learned, make_corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr("graphtrain.data.readers.records.GROUP_BYTES", 300)
    learned.save(tmp_path / "tokenizer")
    made = prepare(
        [make_corpus(TEXTS)],
        tmp_path / "out",
        str(tmp_path / "tokenizer"),
        eod="<|im_end|>",
        validation=0,
        workers=2,
    )
    dataset, tokenizer = (
        IndexedDataset(tmp_path / "out" / "train"),
        dataset_tokenizer(tmp_path / "out" / "train"),
    )
    assert (made.train.eod, made.train.vocab, made.train.tokenizer) == (2, 300, "huggingface")
    assert tokenizer is not None
    texts = [tokenizer.decode(dataset.document(i).tolist()) for i in range(len(dataset))]
    assert texts == [f"{text}<|im_end|>" for text in TEXTS]


def test_another_end_of_documents_is_another_request(learned, make_corpus, tmp_path):
    learned.save(tmp_path / "model")
    for token, number in (("<|im_end|>", 2), ("<|im_start|>", 1)):
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        words = str(tmp_path / "model")
        made = prepare([make_corpus(TEXTS)], tmp_path / "out", words, validation=0, replace=True)
        assert made.train.eod == number


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_a_learned_tokenizer_is_written_for_prepare(make_corpus, tmp_path, kind):
    corpus = make_corpus([f"document {i}: the quick brown fox" for i in range(200)])
    made = train_tokenizer([corpus], tmp_path / "t", kind, 290, special=SPECIAL, validation=0.1)
    assert made.vocab <= 290
    assert load_tokenizer(tmp_path / "t").vocab == load_tokenizer(made.path).vocab == made.vocab
    again = train_tokenizer([corpus], tmp_path / "u", kind, 290, special=SPECIAL, validation=0.1)
    assert load_tokenizer(again.path).digest == load_tokenizer(made.path).digest


def test_tokenizers_that_cannot_be_used_say_why(learned, tmp_path):
    with pytest.raises(DataError, match=r"contains no tokenizer\.json, tokenizer\.model, or vocab"):
        load_tokenizer(tmp_path)
    bad = tmp_path / "tokenizer.json"
    for content in (b"{}", b"\xff", b"[1]", learned_bytes(learned, tmp_path / "x")[:-9]):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer, or damaged: "):
            load_tokenizer(bad)
    with pytest.raises(DataError, match=r"absent\.json: No such file"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"a\.json: No such file"):
        load_tokenizer(f"{tmp_path / 'a.json'},{bad}")
    with pytest.raises(DataError, match=r"not the files of a BPE tokenizer"):
        load_tokenizer(f"{bad},{bad}")
    with pytest.raises(DataError, match="has no token '<none>'; name another one with"):
        load_tokenizer(tmp_path / "x", "<none>")
    with pytest.raises(
        DataError, match="--vocab 256 is too small: 256 bytes and 1 special tokens need 257"
    ):
        train_bpe(TEXTS, 256)
    with pytest.raises(DataError, match="--eod-token does not apply to the tokenizer bytes"):
        load_tokenizer("bytes", "x")


def learned_bytes(tokenizer, directory) -> bytes:
    return (directory / tokenizer.save(directory)[0]).read_bytes()
