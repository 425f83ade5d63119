"""Records of every published shape, to messages."""

import pytest

from graphtrain.data.prepare.conversations import FORMATS, read_conversations
from graphtrain.data.prepare.image_messages import read_image_conversation
from graphtrain.errors import DataError

QUESTION, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
MORE = [QUESTION, ANSWER, {"role": "user", "content": "R"}, {"role": "assistant", "content": "B"}]

RECORDS = {
    "alpaca": [
        ({"instruction": "Q", "input": "", "output": "A"}, [QUESTION, ANSWER]),
        ({"instruction": "R", "output": "B", "history": [["Q", "A"]]}, MORE),
    ],
    "belle": [
        ({"instruction": "Human:Q\nAssistant:A\nHuman:R\nAssistant:\n", "output": "B"}, MORE),
        ({"instruction": "Human: Q \nAssistant:", "output": "A"}, [QUESTION, ANSWER]),
    ],
    "moss": [
        (
            {
                "meta_instruction": "",
                "chat": {
                    "turn_1": {"Human": "<|Human|>: Q<eoh>\n", "MOSS": "<|MOSS|>: A<eom>\n"},
                    "turn_2": {"Human": "<|Human|>: R<eoh>\n", "MOSS": "<|MOSS|>: B<eom>\n"},
                    "turn_3": None,
                },
            },
            MORE,
        ),
        ({"plain_text": "[Human]: Q<eoh> [MOSS]: A<eoa> [Human]: R<eoh> [MOSS]: B<eoa>"}, MORE),
    ],
    "leetcode": [
        (
            {
                "code_with_problem": "Q\n```\n1\n```",
                "code_only": "1",
                "explanation_only": "2",
            },
            [QUESTION, {"role": "assistant", "content": "1\n2"}],
        )
    ],
    "sharegpt": [
        (
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            [QUESTION, ANSWER],
        ),
    ],
    "messages": [
        ({"messages": MORE}, MORE),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, ANSWER]},
            [QUESTION, ANSWER],
        ),
    ],
}
PAIRS = [
    {"prompt": "Q", "chosen": "A", "rejected": "B"},
    {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [MORE[3]]},
    {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, MORE[3]]},
    {"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"},
    {
        "conversations": [{"from": "human", "value": "Q"}],
        "chosen": {"from": "gpt", "value": "A"},
        "rejected": {"from": "gpt", "value": "B"},
    },
]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [(name, *each) for name, cases in RECORDS.items() for each in cases],
)
def test_a_record_becomes_its_messages(name, record, expected, named):
    (found,) = read_conversations(record, name if named else "auto", "line 1")
    assert list(found.messages) == expected


@pytest.mark.parametrize("record", PAIRS)
def test_a_preference_becomes_two_conversations_of_which_the_ends_are_learned(record):
    chosen, rejected = read_conversations(record, "auto", "line 1")
    assert list(chosen.messages) == [QUESTION, ANSWER]
    assert list(rejected.messages) == [QUESTION, MORE[3]]
    assert [one.is_trained_on(1) for one in (chosen, rejected)] == [True, True]


def test_answers_that_lead_to_both_of_a_pair_are_not_learned():
    record = {"chosen": [*MORE[:3], ANSWER], "rejected": [*MORE[:3], MORE[3]]}
    chosen, _ = read_conversations(record, "auto", "line 1")
    assert [chosen.is_trained_on(index) for index in range(4)] == [False, False, False, True]


def test_a_weight_of_0_is_not_learned():
    record = {"messages": [QUESTION, ANSWER | {"weight": 0}, *MORE[2:]]}
    (found,) = read_conversations(record, "auto", "line 1")
    assert [found.is_trained_on(index) for index in range(4)] == [False, False, False, True]


def test_alpacas_input_is_part_of_the_question():
    record = {"instruction": "Add.", "input": "1 2", "output": "3"}
    (found,) = read_conversations(record, "auto", "line 1")
    both = {"instruction": "Add.", "input": "1 2"}
    assert found.messages[0] == {"role": "user", "content": "Add.\n1 2", **both}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "x"}, "has the keys 'text', which match no known format"),
        ({}, "has the keys nothing"),
        ([1], "not a JSON object"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": ["hi"]}, r"messages\[0\] is not an object"),
        (
            {"messages": [{"content": "x"}]},
            r"messages\[0\]: 'role' is absent, empty or not a string",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "'content' is absent or not a string"),
        ({"instruction": "x"}, "'output' is absent"),
        ({"instruction": 1, "output": "y"}, "'instruction' is int, not a string"),
        ({"instruction": "Human: a Assistant: b", "output": "c"}, "does not end with a question"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"chosen": "a", "rejected": "b"}, "the record has no 'prompt'"),
        ({"plain_text": "[Human]: a"}, r"\[Human\]: without \[MOSS\]:"),
    ],
)
def test_what_is_wrong_with_a_record_is_said_with_its_place(record, words):
    with pytest.raises(DataError, match=rf"^a\.jsonl: line 7: .*{words}"):
        read_conversations(record, "auto", "a.jsonl: line 7")


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_of_another_format_than_the_one_named_is_refused(name):
    with pytest.raises(DataError, match="line 1"):
        read_conversations({"something": "else"}, name, "line 1")


TALK = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A line."}]
TURNS = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A line."}]

PAIR = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [ANSWER]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"images": ["a.png"], "messages": TALK}, "has the key 'images', .*--processor FOLDER"),
        ({"image": "a.png", "conversations": TURNS}, "has the key 'image'"),
        (
            {"messages": [TALK[0] | {"images": ["QQ=="]}, TALK[1]]},
            "a message of 'messages' has the key 'images'",
        ),
        (PAIR | {"prompt": [TALK[0] | {"images": ["a.png"]}]}, "a message of 'prompt' has the key"),
        (PAIR | {"chosen": TALK[1] | {"image": "a.png"}}, "a message of 'chosen' has the key"),
        (PAIR | {"rejected": [TALK[1] | {"audio": "a.wav"}]}, "a message of 'rejected' has the"),
        ({"instruction": "Q", "output": "A", "images": ["a.png"]}, "has the key 'images'"),
        ({"videos": ["a.mp4"], "messages": TALK}, "has the key 'videos', which cannot be prepared"),
    ],
)
def test_images_outside_of_the_content_are_refused_and_never_left_out(record, message):
    with pytest.raises(DataError, match=rf"a.jsonl: line 2: {message}"):
        read_conversations(record, "auto", "a.jsonl: line 2")
    if "messages" in record:
        with pytest.raises(DataError, match=rf"a.jsonl: line 2: {message}"):
            read_image_conversation(record, "a.jsonl: line 2")


def test_a_prompt_with_images_is_told_to_remove_them_not_how_to_prepare_data():
    record = {"messages": [TALK[0] | {"images": ["QQ=="]}]}
    with pytest.raises(DataError, match=r"'images', which is not read: .* remove the key$"):
        read_conversations(record, "messages", "line 1", is_prompt=True)


def test_a_record_of_text_may_have_empty_keys_of_images():
    record = {"messages": TALK, "images": [], "image": None}
    (found,) = read_conversations(record, "auto", "line 1")
    assert found == read_conversations({"messages": TALK}, "auto", "line 1")[0]
    assert read_image_conversation(record, "line 1").images == ()
