"""Files of conversations to datasets that say what is learned of them."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import read_description, summary
from graphtrain.data.indexed.merge import merge
from graphtrain.data.indexed.verify import verify
from graphtrain.data.prepare.instructions import instruct
from graphtrain.data.prepare.text import prepare
from graphtrain.data.preview import masked_documents, packing_report
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.errors import DataError

PAIR = {"prompt": "Q", "chosen": "good", "rejected": "bad"}


def conversation(number, turns=1):
    said = [
        [("user", f"Q{number}.{turn}"), ("assistant", f"A{number}.{turn}")] for turn in range(turns)
    ]
    return {"messages": [{"role": role, "content": text} for pair in said for role, text in pair]}


def written(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def made(tmp_path, records, **options):
    source = written(tmp_path / "a.jsonl", records)
    options = {"template": "chatml", "validation": 0, "replace": True} | options
    return instruct([source], tmp_path / "out", "bytes", **options)


def texts(prefix, learned=True):
    found = []
    for number in range(len(IndexedDataset(prefix))):
        ((_, document),) = masked_documents(str(prefix), number, 1)
        found.append([piece.text for piece in document if piece.learned == learned])
    return found


def test_answers_and_their_ends_are_learned(tmp_path):
    result = made(tmp_path, [conversation(number, 2) for number in range(3)])
    prefix = tmp_path / "out/train"
    ends = [[f"A{number}.{turn}<|im_end|>" for turn in range(2)] for number in range(3)]
    assert texts(prefix) == ends
    about = result.train.conversations
    assert about.learned == sum(len(text) for each in ends for text in each)
    assert (result.train.documents, result.skipped_records) == (3, 0)
    assert result.spelled_out == ("<|im_start|>", "<|im_end|>")
    assert verify(prefix)["documents"] == 3
    assert "<|im_start|>" in (tmp_path / "out/chat_template.jinja").read_text()
    assert summary(prefix)["learned tokens"] == about.learned
    assert packing_report(str(prefix), 200) == "length 200: 3 rows, 68.5% full"
    with (
        pytest.warns(UserWarning, match=r"longer than --length = 9 \(the longest, document"),
        pytest.raises(DataError, match="no document can be used; increase --length"),
    ):
        packing_report(str(prefix), 9)


def test_only_the_last_answer_or_everything_may_be_learned(tmp_path):
    made(tmp_path, [conversation(0, 3)], train_on="last")
    assert texts(tmp_path / "out/train") == [["A0.2<|im_end|>"]]
    made(tmp_path, [conversation(0, 3)], train_on="all")
    assert texts(tmp_path / "out/train", learned=False) == [[]]


def test_records_without_an_answer_are_left_out_and_counted(tmp_path):
    question = {"messages": conversation(1)["messages"][:1]}
    result = made(tmp_path, [question, conversation(2), question])
    assert (result.train.documents, result.skipped_records) == (1, 2)
    with pytest.raises(DataError, match="no record contains an answer to train on"):
        made(tmp_path, [question])


def test_pairs_stay_together_in_a_split(tmp_path):
    records = [PAIR | {"prompt": f"Q{number}"} for number in range(60)]
    result = made(tmp_path, records, validation=0.3)
    counts = result.train.documents, result.validation.documents
    assert sum(counts) == 120 and min(counts) > 0 and result.skipped_records == 0
    for name in ("train", "validation"):
        prefix = tmp_path / "out" / name
        found = texts(prefix)
        assert found == [["good<|im_end|>"], ["bad<|im_end|>"]] * (len(found) // 2)
        asked = texts(prefix, learned=False)
        assert asked[::2] == asked[1::2]
        verify(prefix)


def test_an_array_packed_or_not_is_read_like_lines(tmp_path):
    records = [conversation(number, 1 + number % 3) for number in range(50)]
    made(tmp_path, records)
    expected = [path.read_bytes() for path in sorted(tmp_path.glob("out/train*.???"))]
    assert len(expected) == 4
    for name, text in [
        ("a.json", json.dumps(records, indent=2)),
        ("b.json", " \n" + json.dumps(records)),
        ("c.json.gz", json.dumps(records)),
    ]:
        data = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
        (tmp_path / name).write_bytes(data)
        instruct(
            [tmp_path / name],
            tmp_path / "out",
            "bytes",
            template="chatml",
            validation=0,
            replace=True,
        )
        assert [path.read_bytes() for path in sorted(tmp_path.glob("out/train*.???"))] == expected


def test_the_same_request_again_does_nothing_and_another_template_does(tmp_path):
    records = [conversation(number) for number in range(5)]
    assert not made(tmp_path, records).up_to_date
    assert made(tmp_path, records).up_to_date
    assert not made(tmp_path, records, template="llama3").up_to_date
    assert made(tmp_path, records, template="llama3").up_to_date


def test_workers_change_nothing(tmp_path):
    records = [conversation(number, 5) for number in range(3000)]
    made(tmp_path, records, workers=1)
    expected = [path.read_bytes() for path in sorted(tmp_path.glob("out/train*.???"))]
    (tmp_path / "out/manifest.json").unlink()
    made(tmp_path, records, workers=2)
    assert [path.read_bytes() for path in sorted(tmp_path.glob("out/train*.???"))] == expected


def test_an_interrupted_preparation_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("graphtrain.data.readers.records.GROUP_BYTES", 2000)
    records = [conversation(number, 5) for number in range(50)]
    made(tmp_path, records)
    expected = [path.read_bytes() for path in sorted(tmp_path.glob("out/train*.???"))]
    (tmp_path / "out/manifest.json").unlink()
    monkeypatch.setattr("graphtrain.data.prepare.splits._SAVE_EVERY", 0.0)
    steps = []

    def interrupt(stage, fraction):
        steps.append(fraction)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, records, report=interrupt)
    seen = []
    made(tmp_path, records, report=lambda stage, fraction: seen.append(fraction))
    assert seen[0] > steps[0]
    assert [path.read_bytes() for path in sorted(tmp_path.glob("out/train*.???"))] == expected


def test_text_takes_the_place_of_conversations(tmp_path):
    made(tmp_path, [conversation(0)])
    source = written(tmp_path / "b.jsonl", [{"text": "hello"}])
    with pytest.raises(DataError, match="was made from another request, which differs in the text"):
        prepare([source], tmp_path / "out", "bytes", validation=0)
    prepare([source], tmp_path / "out", "bytes", validation=0, replace=True)
    assert not list(tmp_path.glob("out/*learned*")) and not list(tmp_path.glob("out/*.jinja"))


def test_datasets_are_merged_with_what_is_learned(tmp_path):
    for name, first in (("x", 0), ("y", 10)):
        records = [conversation(number, 2) for number in range(first, first + 4)]
        made(tmp_path, records)
        (tmp_path / "out").rename(tmp_path / name)
    prefixes = [tmp_path / "x/train", tmp_path / "y/train"]
    description = merge(prefixes, tmp_path / "both/train")
    assert description.conversations.learned == sum(
        read_description(prefix).conversations.learned for prefix in prefixes
    )
    assert texts(tmp_path / "both/train") == [*texts(prefixes[0]), *texts(prefixes[1])]
    assert verify(tmp_path / "both/train")["documents"] == 8
    assert (tmp_path / "both/chat_template.jinja").is_file()
    made(tmp_path, [PAIR])
    with pytest.raises(DataError, match=r"differ in kind .*, chat template or --train-on"):
        merge([prefixes[0], tmp_path / "out/train"], tmp_path / "mixed/train")


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([0, 2, 1, 3], "not a list of ordered spans"),
        ([0, 500], "within its 69 tokens"),
        ([1], "not a list of ordered spans"),
    ],
)
def test_verify_finds_learned_parts_that_are_not_of_the_document(tmp_path, spans, words):
    from graphtrain.data.indexed.loss_spans import loss_spans_writer

    made(tmp_path, [conversation(0)])
    prefix = tmp_path / "out/train"
    with loss_spans_writer(prefix) as writer:
        writer.append(np.array(spans))
    with pytest.raises(DataError, match=rf"train_learned.bin: byte 0: .*{words}"):
        verify(prefix)


def test_learned_parts_of_another_dataset_are_refused(tmp_path):
    made(tmp_path, [conversation(0)])
    (tmp_path / "out").rename(tmp_path / "other")
    made(tmp_path, [conversation(0), conversation(1)])
    for ending in ("bin", "idx"):
        name = f"train_learned.{ending}"
        (tmp_path / "out" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(DataError, match=r"contains the loss masks of 1 documents, but .* has 2"):
        verify(tmp_path / "out/train")
    (tmp_path / "out/train_learned.idx").unlink()
    with pytest.raises(DataError, match=r"train_learned.idx: no such file"):
        verify(tmp_path / "out/train")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"messages": []}'], "line 1: 'messages' is not a list"),
        ([json.dumps(conversation(0)), "{"], "line 2: not JSON"),
        ([json.dumps(conversation(0)), "[1]"], "line 2: not a JSON object"),
        ([json.dumps(conversation(0)), json.dumps(PAIR)], "line 2: is a preference pair, but"),
        ([json.dumps(PAIR), json.dumps(conversation(0))], "line 2: is a conversation, but"),
        ([json.dumps(conversation(0)), '{"x": "\\ud800"}'], "line 2: has the keys 'x'"),
        ([], "the corpus is empty"),
    ],
)
def test_what_cannot_be_used_is_named_with_file_and_line(tmp_path, lines, words):
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"bad\.jsonl: {words}"):
        instruct([tmp_path / "bad.jsonl"], tmp_path / "out", "bytes", template="chatml")
    assert not list(tmp_path.glob("out/train*"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"messages"', "ends at line 1, byte 1, inside its JSON array"),
        ('[{"a": "}"}\n, 3]', "line 1: has the keys 'a'"),
        (json.dumps([conversation(0)])[:-1], "ends at line 1, byte .*, inside its JSON array"),
        (
            "[\n\n" + json.dumps(conversation(0)) + ",\n\n{'}]",
            "inside its JSON array|line 5: not JSON",
        ),
        ("[]", "the corpus is empty"),
    ],
)
def test_a_damaged_array_is_named_with_the_place(tmp_path, text, words):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(DataError, match=rf"bad\.json: ({words})"):
        instruct([tmp_path / "bad.json"], tmp_path / "out", "bytes", template="chatml")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["messages", "conversations", "chosen", "rejected", "prompt", "instruction", "output", "chat",
     "plain_text", "role", "content", "from", "value", "history", "system", "input", "tools"]
)  # fmt: skip
RECORDS = st.dictionaries(
    KEYS, VALUES | st.lists(st.dictionaries(KEYS, VALUES, max_size=3), max_size=3), max_size=4
)


@settings(max_examples=150)
@given(record=RECORDS, name=st.sampled_from(["auto", "messages", "alpaca", "moss", "preference"]))
def test_any_record_is_a_conversation_or_a_clear_error(record, name):
    from graphtrain.data.prepare.chat_templates import find_template
    from graphtrain.data.prepare.conversations import read_conversations

    template = find_template("chatml", ByteTokenizer())
    try:
        for found in read_conversations(record, name, "a.jsonl: line 9"):
            template.render(found, "answers", "a.jsonl: line 9")
    except DataError as error:
        assert str(error).startswith("a.jsonl: line 9: ")


@settings(max_examples=60)
@given(
    records=st.lists(VALUES, max_size=8),
    indent=st.sampled_from([None, 0, 3]),
    block=st.integers(1, 40),
)
def test_any_array_is_read_as_its_elements(tmp_path_factory, records, indent, block):
    from unittest import mock

    from graphtrain.data.readers.json_lines import read_lines
    from graphtrain.data.readers.records import FilePosition

    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=False))
    nested = [record for record in records if isinstance(record, dict | list)]
    if len(nested) < len(records):
        return  # only objects and arrays are found one by one
    small = mock.patch("graphtrain.data.readers.records.GROUP_BYTES", 1)
    with mock.patch("graphtrain.data.readers.json_array._BLOCK", block), small:
        groups = list(read_lines(path, "line", FilePosition()))
        assert [json.loads(one) for group in groups for one in group.records] == records
        for index, group in enumerate(groups):
            rest = [one for each in groups[index + 1 :] for one in each.records]
            again = [
                one
                for each in read_lines(path, "line", group.next_position)
                for one in each.records
            ]
            assert again == rest
