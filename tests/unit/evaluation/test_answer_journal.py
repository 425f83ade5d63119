"""Answers are kept: what was written is found again, and what was cut off or changed is not."""

from pathlib import Path

import pytest

from graphtrain.errors import TrainingError
from graphtrain.run.evaluation.answer_journal import AnswerJournal, request_key


def test_answers_are_found_again_and_a_line_that_was_cut_off_is_not(tmp_path):
    path = tmp_path / "evaluation" / "a.jsonl"
    one, two, three = (request_key("score", (1, 2), index) for index in range(3))
    with AnswerJournal(path) as journal:
        journal.write(one, [-1.5, True])
        journal.write(two, "a text")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])  # killed while it wrote
    with AnswerJournal(path) as journal:
        found = [journal.find(key) for key in (one, two, three)]
        assert found == [[-1.5, True], "a text", None]
        assert journal.reused == 2
        journal.write(three, "more")
    with AnswerJournal(path) as journal:
        assert journal.find(three) == "more"


def test_an_answer_that_was_changed_is_not_used(tmp_path):
    path = tmp_path / "a.jsonl"
    key = request_key("generate", "a")
    with AnswerJournal(path) as journal:
        journal.write(key, "right")
    path.write_bytes(path.read_bytes().replace(b"right", b"wrong"))
    with (
        pytest.warns(UserWarning, match="a.jsonl: line 1: not as written"),
        AnswerJournal(path) as journal,
    ):
        assert journal.find(key) is None
        journal.write(key, "right")
    with AnswerJournal(path) as journal:  # and said once
        assert journal.find(key) == "right"


@pytest.mark.parametrize("line", [b"[" * 100_000, b"\xff", b"5"])
def test_lines_that_are_no_answers_are_said_once(tmp_path, line):
    path = tmp_path / "a.jsonl"
    with AnswerJournal(path) as journal:
        journal.write("key", "right")
    path.write_bytes(path.read_bytes() + (line + b"\n") * 3)
    with pytest.warns(UserWarning) as said, AnswerJournal(path) as journal:
        assert journal.find("key") == "right"
    (one,) = said
    assert "a.jsonl: line 2 and 2 other lines: not as written" in str(one.message)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_with_the_directory(tmp_path):
    with pytest.raises(TrainingError, match=rf"{tmp_path} cannot be written .*free space there"):
        journal = AnswerJournal.__new__(AnswerJournal)
        journal.path, journal._file = tmp_path / "a.jsonl", open("/dev/full", "r+b")  # noqa: SIM115
        with journal:
            journal.write("key", "answer")


def test_one_process_writes_at_a_time(tmp_path):
    with (
        AnswerJournal(tmp_path / "a.jsonl"),
        pytest.raises(TrainingError, match="another process evaluates this model"),
    ):
        AnswerJournal(tmp_path / "a.jsonl")
    with AnswerJournal(tmp_path / "a.jsonl"):
        pass
