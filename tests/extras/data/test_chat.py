"""Chat templates: token for token what transformers makes, and exactly the answers learned."""

import json
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.prepare.chat_templates import (
    Template,
    find_template,
    split_special_tokens,
    template_names,
)
from graphtrain.data.prepare.conversations import Conversation
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.data.tokenizers.huggingface import read_huggingface, train_bpe
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.errors import DataError

MARKS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<reserved_106>", "<reserved_107>",
]  # fmt: skip
TEXTS = ["The quick brown fox jumps over the lazy dog. user assistant [INST]\n\n What is it?"] * 20

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the fox?"},
    {"role": "assistant", "content": "It jumps.\n\n  Over it."},
    {"role": "user", "content": "And the dog?"},
    {"role": "assistant", "content": "It is lazy."},
]

# As published ones are: no {% generation %}; the second drops what earlier answers thought.
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer with the marks of templates, as a model's folder has it."""
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 400, MARKS).save(path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    config["eos_token"] = "</s>"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def with_prefix(tmp_path_factory, folder):
    """As Llama 2's: a space before the text, spaces as a letter, what is unknown as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    space = "\u2581"
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback()])
    spelled = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*spelled, *MARKS])
    tokenizer.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("prefix")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return path


@pytest.fixture(scope="module")
def tokenizers(folder):
    sentencepiece = train_sentencepiece(TEXTS, 330, MARKS[2:])
    return [read_huggingface(folder / "tokenizer.json"), sentencepiece, ByteTokenizer()]


def learned(template, tokenizer, messages, train_on="answers", **settings):
    """Tokens of a conversation, and the texts of its learned parts."""
    conversation = Conversation(tuple(messages), **settings)
    rendered = template.render(conversation, train_on, "line 1")
    (placed,) = tokenizer.encode_with_offsets([rendered.text])
    return placed, [
        tokenizer.decode(placed.tokens[begin:end]) for begin, end in placed.spans(rendered.spans)
    ]


@pytest.mark.parametrize("kind", ["folder", "with_prefix"])
@pytest.mark.parametrize("name", template_names())
def test_tokens_and_learned_tokens_are_those_of_transformers(request, kind, name):
    from transformers import AutoTokenizer

    folder = request.getfixturevalue(kind)
    tokenizer = load_tokenizer(folder)
    template = find_template(name, tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [one for one in MESSAGES if one["role"] != "system"] if name == "i" else MESSAGES
    expected = theirs.apply_chat_template(
        messages,
        chat_template=template.text,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    rendered = template.render(Conversation(tuple(messages)), "answers", "line 1")
    (placed,) = tokenizer.encode_with_offsets([rendered.text])
    mask = np.zeros(len(placed.tokens), int)
    for begin, end in placed.spans(rendered.spans):
        mask[begin:end] = 1
    assert placed.tokens.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["assistant_masks"]


ENDS = {
    "chatml": "<|im_end|>", "qwen": "<|im_end|>", "internlm2": "<|im_end|>",
    "llama3": "<|eot_id|>", "internlm": "<eoa>",
}  # fmt: skip
LETTERS = st.text(string.ascii_letters + " .,é中", min_size=1, max_size=20)
WORDS = LETTERS.map(lambda text: f"x{text}x")  # no token reaches from a template's space into it


@settings(max_examples=25)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), system=st.none() | WORDS)
def test_what_is_learned_is_exactly_the_answers_and_their_ends(tokenizers, turns, system):
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    for tokenizer in tokenizers:
        for name in template_names():
            template = find_template(name, tokenizer)
            _, texts = learned(template, tokenizer, messages)
            # The other tokenizers decode no end of sequence.
            end = ENDS.get(name, "</s>" if tokenizer.kind == "huggingface" else "")
            space = " " if name == "llama2" else ""
            assert [text.removeprefix(space) for text in texts] == [
                f"{answer}{space}{end}" for _, answer in turns
            ], (tokenizer.kind, name)
            _, last = learned(template, tokenizer, messages, "last")
            assert last == texts[-1:]
            placed, whole = learned(template, tokenizer, messages, "all")
            assert whole == [tokenizer.decode(placed.tokens)]


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:3]])
def test_answers_are_found_in_a_template_that_does_not_mark_them(tokenizers, messages):
    for tokenizer in tokenizers:
        marked = learned(find_template("chatml", tokenizer), tokenizer, messages)
        found = learned(Template("own", PLAIN), tokenizer, messages)
        assert found[1] == marked[1]
        assert found[0].tokens.tolist() == marked[0].tokens.tolist()


def test_answers_are_found_where_the_last_is_written_in_another_way(tokenizers):
    _, texts = learned(Template("own", THINKING), tokenizers[-1], MESSAGES)
    think = "<think>\n\n</think>\n\n"
    assert texts == ["It jumps.\n\n  Over it.<|im_end|>", f"{think}It is lazy.<|im_end|>"]


def test_the_same_answer_twice_is_found_twice(tokenizers):
    messages = [MESSAGES[1], MESSAGES[4], MESSAGES[1] | {"content": "It is lazy."}, MESSAGES[4]]
    _, texts = learned(Template("own", PLAIN), tokenizers[-1], messages)
    assert texts == ["It is lazy.<|im_end|>"] * 2


def test_the_template_of_a_tokenizer_is_its_own(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(DataError, match="has no chat template of its own; choose one with"):
        find_template("own", load_tokenizer(tmp_path))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": PLAIN}]
    for value in (PLAIN, named):
        config["chat_template"] = value
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        found = find_template("own", load_tokenizer(tmp_path))
        assert found.text == PLAIN and found.special["bos_token"] == "<s>"
        assert find_template(str(tmp_path), ByteTokenizer()).text == PLAIN
    (tmp_path / "chat_template.jinja").write_text("alone")
    assert find_template("own", load_tokenizer(tmp_path)).text == "alone"


def test_marks_that_are_no_tokens_are_known(tokenizers):
    names = [split_special_tokens(find_template("chatml", each), each) for each in tokenizers]
    assert names == [[], [], ["<|im_start|>", "<|im_end|>"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('no system') }}", "failed: no system"),
        ("{{ messages[7].content }}", "failed: .*"),
        ("{{ messages.append(1) }}", "failed: .*"),
        ("{{ ''.__class__.__mro__ }}", "failed: .*unsafe"),
        ("nothing of it", "has no .* marks, and message 2 cannot be located"),
        (
            "{% generation %}{{ messages[2].content }}{% endgeneration %}",
            "marks 1 generated parts, but the .* has 2 assistant",
        ),
    ],
)
def test_a_template_that_does_not_work_is_named_with_the_place(text, words):
    with pytest.raises(DataError, match=f"^a.jsonl: line 3: the template odd {words}"):
        template = Template("odd", text)
        template.render(Conversation(tuple(MESSAGES)), "answers", "a.jsonl: line 3")


def test_a_template_that_is_no_template_is_refused(tmp_path):
    (tmp_path / "bad.jinja").write_text("\n{% for x %}")
    for word, words in [
        (str(tmp_path / "bad.jinja"), "line 2: "),
        ("chatm1", "choose own, alpaca, .*, qwen, or name a file"),
        (str(tmp_path), "Is a directory"),
    ]:
        with pytest.raises(DataError, match=words):
            find_template(word, ByteTokenizer())


def test_text_that_cannot_be_written_is_refused():
    for content, words in [("\ud800", "not valid Unicode"), ("\ufdd0", "U\\+FDD0")]:
        messages = ({"role": "user", "content": content}, MESSAGES[2])
        with pytest.raises(DataError, match=f"line 1: .*{words}"):
            Template("own", PLAIN).render(Conversation(messages), "answers", "line 1")
