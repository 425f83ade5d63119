"""BOS and EOS: the ids of transformers, for tokenizer files made as published ones are."""

import json

import numpy as np
import pytest
import transformers
from click.testing import CliRunner
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from graphtrain.cli.data import command
from graphtrain.data.batches.concat_packing import ConcatPacking
from graphtrain.data.batches.document_packing import DocumentPacking
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import dataset_tokenizer, read_description
from graphtrain.data.indexed.loss_spans import LossSpans
from graphtrain.data.indexed.merge import merge
from graphtrain.data.indexed.verify import verify
from graphtrain.data.prepare.instructions import instruct
from graphtrain.data.prepare.text import prepare
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.errors import DataError
from graphtrain.run.prompt import encode_prompt

CORPUS = ["the quick brown fox jumps over the lazy dog. user model assistant [INST] 12\n"] * 30
TEXTS = ["the fox", "  the lazy dog\n\njumps 123", "é", "over the dog, the fox"]
MESSAGES = [
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": "the lazy dog"},
    {"role": "user", "content": "jumps?"},
    {"role": "assistant", "content": "over"},
]

# Llama 3's and Qwen's expressions that split text into words; they differ in digits.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"llama3": r"\p{N}{1,3}", "qwen": r"\p{N}"}
CHAT = {
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + "
    "m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}"
    "{% endfor %}",
    "llama3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt "
    "%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + "
    "m.content + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>assistant\n' }}{% endif %}",
    "qwen": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}",
}
CHAT["mistral"] = "{{ bos_token }}" + CHAT["llama2"].replace("bos_token + ", "")
SPECIAL = {
    "llama2": ["<unk>", "<s>", "</s>"],
    "mistral": ["<unk>", "<s>", "</s>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
               "<|eot_id|>"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}  # fmt: skip
BOS = {"llama2": "<s>", "mistral": "<s>", "llama3": "<|begin_of_text|>", "gemma": "<bos>"}
EOS = {"llama2": "</s>", "mistral": "</s>", "llama3": "<|end_of_text|>", "gemma": "<eos>",
       "qwen": "<|im_end|>"}  # fmt: skip
CLASS = {"llama2": "LlamaTokenizer", "mistral": "PreTrainedTokenizerFast",
         "gemma": "GemmaTokenizer", "llama3": "PreTrainedTokenizerFast",
         "qwen": "Qwen2Tokenizer"}  # fmt: skip
FAMILIES = list(SPECIAL)


def write_tokenizer(folder, family):
    """A small tokenizer with the parts of a family's published tokenizer.json and config."""
    folder.mkdir()
    byte_fallback = family in ("llama2", "mistral", "gemma")
    tokenizer = Tokenizer(
        models.BPE(byte_fallback=byte_fallback, fuse_unk=byte_fallback, unk_token="<unk>")
        if byte_fallback
        else models.BPE()
    )
    special = [AddedToken(token, normalized=False, special=True) for token in SPECIAL[family]]
    alphabet = []
    if byte_fallback:
        special += [AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)]
        # Llama 2's newer files split; Mistral's older ones, as Llama 2's, only normalize.
        replace = normalizers.Replace(" ", "▁")
        if family == "llama2":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        elif family == "mistral":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        else:
            tokenizer.normalizer = replace
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        words = Regex(WORDS.replace("DIGITS", DIGITS[family]))
        split = pre_tokenizers.Split(words, "isolated", invert=False)
        if family == "qwen":
            tokenizer.normalizer = normalizers.NFC()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    bytes_post = processors.ByteLevel(trim_offsets=False)
    if bos := BOS.get(family):
        template = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
        tokenizer.post_processor = (
            processors.Sequence([bytes_post, template]) if family == "llama3" else template
        )
    else:
        tokenizer.post_processor = bytes_post
    definition = json.loads(tokenizer.to_str())
    if byte_fallback:  # the bytes are part of the vocabulary, not of the added tokens
        definition["added_tokens"] = definition["added_tokens"][: len(SPECIAL[family])]
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    config = {
        "tokenizer_class": CLASS[family],
        "eos_token": EOS[family],
        "chat_template": CHAT[family],
        "add_bos_token": family != "qwen",
        "clean_up_tokenization_spaces": False,
    }
    if byte_fallback:
        config["unk_token"] = "<unk>"
    config |= {"bos_token": bos} if bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizers") / family, family)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset.document(index).tolist() for index in range(len(dataset))]


def prepared(path, tokenizer, texts=TEXTS, **settings):
    corpus = write_lines(path / "corpus.jsonl", [{"text": text} for text in texts])
    prepare([corpus], path / "data", str(tokenizer), validation=0, replace=True, **settings)
    return path / "data" / "train"


def instructed(path, tokenizer, records=({"messages": MESSAGES},), **settings):
    corpus = write_lines(path / "chat.jsonl", records)
    return instruct([corpus], path / "chat", str(tokenizer), validation=0, replace=True, **settings)


def test_text_has_the_ids_of_transformers_and_an_end(tmp_path, family, folder, theirs):
    prefix = prepared(tmp_path, folder)
    eod = theirs.convert_tokens_to_ids(EOS[family])
    assert documents(prefix) == [[*theirs(text).input_ids, eod] for text in TEXTS]
    bos = theirs.convert_tokens_to_ids(BOS[family]) if family in BOS else None
    description = read_description(prefix)
    assert (description.bos, description.eod) == ((bos,) if family in BOS else (), eod)
    verify(prefix)


def test_text_with_and_without_bos(tmp_path, family, folder, theirs):
    plain = [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    prefix = prepared(tmp_path, folder, bos=False, append_eod=False)
    assert documents(prefix) == plain
    assert read_description(prefix).bos == ()
    if family not in BOS:
        with pytest.raises(DataError, match="no beginning-of-sequence token; omit --bos"):
            prepared(tmp_path, folder, bos=True)
        return
    prefix = prepared(tmp_path, folder, bos=True, append_eod=False)
    assert documents(prefix) == [theirs(text).input_ids for text in TEXTS]


@pytest.mark.parametrize("family", list(BOS), indirect=True)
def test_a_text_that_spells_out_bos_does_not_get_two(tmp_path, family, folder, theirs):
    prefix = prepared(tmp_path, folder, [BOS[family] + "the fox"], append_eod=False)
    (document,) = documents(prefix)
    assert document == theirs(BOS[family] + "the fox", add_special_tokens=False).input_ids
    assert document.count(theirs.bos_token_id) == 1


def test_a_chat_has_the_ids_of_transformers(tmp_path, family, folder, theirs):
    result = instructed(tmp_path, folder)
    (document,) = documents(tmp_path / "chat/train")
    assert document == theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    bos = (theirs.bos_token_id,) if family in BOS else ()
    assert (read_description(tmp_path / "chat/train").bos, result.missing_bos) == (bos, False)
    verify(tmp_path / "chat/train")


def test_preference_pairs_begin_as_chats_do(tmp_path, family, folder, theirs):
    rejected = [*MESSAGES[:3], {"role": "assistant", "content": "the fox"}]
    instructed(tmp_path, folder, [{"chosen": MESSAGES, "rejected": rejected}])
    assert documents(tmp_path / "chat/train") == [
        theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        for messages in (MESSAGES, rejected)
    ]


@pytest.mark.parametrize("family", list(BOS), indirect=True)
def test_bos_of_a_template_that_writes_none(tmp_path, family, folder, theirs):
    """--bos adds it and moves the loss mask along; by default the command says it is missing."""
    without = instructed(tmp_path, folder, template="chatml")
    (plain,) = documents(tmp_path / "chat/train")
    spans = LossSpans(IndexedDataset(tmp_path / "chat/train")).mask(0, len(plain))
    assert without.missing_bos
    assert theirs.bos_token_id not in plain
    command_line = ["instruct", str(tmp_path / "chat.jsonl"), "--validation", "0"]
    command_line += ["--output", str(tmp_path / "again"), "--tokenizer", str(folder)]
    said = CliRunner().invoke(command, [*command_line, "--chat-template", "chatml"])
    assert "documents begin without it" in said.stderr
    assert not instructed(tmp_path, folder, template="chatml", bos=True).missing_bos
    (document,) = documents(tmp_path / "chat/train")
    assert document == [theirs.bos_token_id, *plain]
    mask = LossSpans(IndexedDataset(tmp_path / "chat/train")).mask(0, len(document))
    assert mask.tolist() == [0, *spans.tolist()]
    assert read_description(tmp_path / "chat/train").bos == (theirs.bos_token_id,)


@pytest.mark.parametrize("family", list(BOS), indirect=True)
def test_bos_of_a_template_is_never_doubled_and_can_be_removed(tmp_path, family, folder, theirs):
    want = theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    instructed(tmp_path, folder, bos=True)
    assert documents(tmp_path / "chat/train") == [want]
    mask = LossSpans(IndexedDataset(tmp_path / "chat/train")).mask(0, len(want))
    instructed(tmp_path, folder, bos=False)
    assert documents(tmp_path / "chat/train") == [want[1:]]
    shifted = LossSpans(IndexedDataset(tmp_path / "chat/train")).mask(0, len(want) - 1)
    assert shifted.tolist() == mask[1:].tolist()
    assert read_description(tmp_path / "chat/train").bos == ()


def test_isolated_documents_begin_at_bos(tmp_path):
    folder = write_tokenizer(tmp_path / "llama3", "llama3")
    prefix = prepared(tmp_path, folder)
    dataset = IndexedDataset(prefix)
    bos = read_description(prefix).bos[0]
    packing = ConcatPacking(dataset, 16, isolate_documents=True)
    rows = packing.batch(range(len(packing)))
    segments = rows["documents"]
    changed = np.diff(segments, axis=1, prepend=-1) != 0
    starts = (rows["tokens"] == bos) & (segments > 0)
    assert starts.sum() == len(TEXTS)
    assert changed[starts].all()
    assert not (rows["targets"] == bos)[rows["weights"] > 0].any()  # nothing predicts a BOS
    packed = DocumentPacking(
        dataset, 40, loss_spans=None, fit=True, overlong="error", isolate_documents=True
    ).batch([0])
    begins = (np.diff(packed["documents"], axis=1, prepend=0) != 0) & (packed["documents"] > 0)
    assert (packed["tokens"][begins] == bos).all()


def test_a_post_processor_that_adds_eos_names_the_end_and_it_is_written_once(tmp_path):
    folder = write_tokenizer(tmp_path / "llama2", "llama2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<unk>"}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert documents(prepared(tmp_path, folder)) == [theirs(text).input_ids for text in TEXTS]


@pytest.mark.parametrize("config", [None, {}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_sentencepiece_adds_bos_as_the_config_next_to_it(tmp_path, config):
    folder = tmp_path / "model"
    train_sentencepiece(CORPUS, 310).save(_made(folder))
    if config is not None:
        config |= {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "config.json").write_text('{"model_type": "llama"}')
        ids = transformers.AutoTokenizer.from_pretrained(folder)("the fox").input_ids
        assert (ids[0] == 1) == bool(config.get("add_bos_token"))
    adds_bos = bool(config and config.get("add_bos_token"))
    prefix = prepared(tmp_path, folder / "tokenizer.model", append_eod=False)
    plain = load_tokenizer(folder).encode_batch(TEXTS)
    assert documents(prefix) == [[*([1] * adds_bos), *tokens.tolist()] for tokens in plain]
    assert dataset_tokenizer(prefix).prefix == read_description(prefix).bos == (1,) * adds_bos
    prepared(tmp_path, folder / "tokenizer.model", bos=not adds_bos, append_eod=False)
    assert read_description(prefix).bos == (1,) * (not adds_bos)


def test_special_tokens_in_a_raw_prompt_of_sentencepiece_are_those_of_transformers(tmp_path):
    train_sentencepiece(CORPUS, 310).save(_made(tmp_path / "model"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = load_tokenizer(tmp_path / "model")
    for text in ("</s>the fox</s> jumps", "<s>dog</s></s>over", "<unk>the <s>", "<s>the</ s>fox"):
        expected = theirs(text, add_special_tokens=False).input_ids
        assert encode_prompt(ours, text, ()) == expected, text


def test_gpt2_files_add_bos_as_the_config_next_to_them(tmp_path):
    from tests.extras.data.test_huggingface import train_bpe

    train_bpe(CORPUS, 290).save(_made(tmp_path / "whole"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "whole/tokenizer.json"))
    tokenizer.model.save(str(_made(tmp_path / "files")))
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    (tmp_path / "files/tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "files")
    assert documents(prepared(tmp_path, tmp_path / "files", append_eod=False)) == [
        theirs(text).input_ids for text in TEXTS
    ]
    assert theirs("the").input_ids[0] == 0


def _made(folder):
    folder.mkdir()
    return folder


def test_a_dataset_of_an_older_version_has_no_bos_and_is_up_to_date(tmp_path):
    tokenizer = train_sentencepiece(CORPUS, 310).save(_made(tmp_path / "model"))[0]
    prefix = prepared(tmp_path, tmp_path / "model" / tokenizer)
    description, manifest = (prefix.with_name(name) for name in ("train.json", "manifest.json"))
    record = json.loads(description.read_text())
    for name in ("bos", "samples", "digest"):  # which such a version does not have
        del record[name]
    description.write_text(json.dumps(record))
    record = json.loads(manifest.read_text())
    del record["request"]["bos"]
    record["files"]["train.json"] = description.stat().st_size
    manifest.write_text(json.dumps(record))
    assert read_description(prefix).bos == ()
    verify(prefix)
    again = prepare(
        [tmp_path / "corpus.jsonl"], tmp_path / "data", str(tmp_path / "model"), validation=0
    )
    assert again.up_to_date


def test_datasets_with_and_without_bos_do_not_merge_and_damage_is_seen(tmp_path):
    folder = write_tokenizer(tmp_path / "llama3", "llama3")
    _made(tmp_path / "a")
    _made(tmp_path / "b")
    prefixes = [prepared(tmp_path / name, folder, bos=name == "a") for name in "ab"]
    with pytest.raises(DataError, match="or only one with a beginning-of-sequence token"):
        merge(prefixes, tmp_path / "merged")
    assert merge([prefixes[0]] * 2, tmp_path / "both").bos == (0,)
    described = json.loads(prefixes[1].with_suffix(".json").read_text()) | {"bos": [0]}
    del described["digest"]  # written so, not damaged
    prefixes[1].with_suffix(".json").write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"document 0 begins with token \d+, not with the beg"):
        verify(prefixes[1])
