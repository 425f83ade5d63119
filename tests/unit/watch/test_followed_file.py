"""A followed file: each byte is read once, and what is not a sound file is said."""

import os

import pytest

from graphtrain.run.watch.followed_file import FollowedFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lines"


def test_each_line_is_read_once_and_half_a_line_when_it_is_whole(path, monkeypatch):
    file, read = FollowedFile(path), []
    pread = os.pread

    def count(descriptor: int, size: int, offset: int) -> bytes:
        content = pread(descriptor, size, offset)
        read.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", count)
    assert file.read() == [] and not file.exists
    path.write_bytes(b"x" * 100_000 + b"\none\ntw")
    assert file.read() == [b"x" * 100_000, b"one"] and file.remaining == 2
    read.clear()
    with path.open("ab") as more:
        more.write(b"o\nthree\n")
    assert file.read() == [b"two", b"three"] and file.remaining == 0
    assert file.read() == [] and file.generation == 0
    assert sum(read) < 400  # the new lines, and a few bytes before them


def test_a_large_file_is_read_in_chunks(path):
    path.write_bytes(b"".join(b"%03d\n" % number for number in range(100)))
    file, lines, behind = FollowedFile(path, chunk=42), [], []
    for _ in range(11):
        lines += file.read()
        behind.append(file.is_behind)
    assert lines == [b"%03d" % number for number in range(100)]
    assert behind == [True] * 9 + [False] * 2


@pytest.mark.parametrize("how", ["replaced", "truncated", "rewritten", "removed"])
def test_a_file_that_is_another_one_is_read_from_its_beginning(path, how):
    path.write_bytes(b"one\ntwo\n")
    file = FollowedFile(path)
    assert file.read() == [b"one", b"two"]
    if how == "replaced":  # as a resumed run does it
        path.with_suffix(".new").write_bytes(b"one\nfour\nfive\n")
        path.with_suffix(".new").replace(path)
    elif how == "truncated":
        path.write_bytes(b"one\n")
    elif how == "rewritten":  # in place, and longer
        path.write_bytes(b"four\nfive\nsix\n")
    else:
        path.unlink()
    expected = {"replaced": 3, "truncated": 1, "rewritten": 3, "removed": 0}
    assert len(file.read()) == expected[how] and file.generation == 1


def test_a_line_longer_than_a_chunk_is_left_out_and_counted(path):
    path.write_bytes(b"one\n" + b"x" * 100 + b"\ntwo\n")
    file, lines = FollowedFile(path, chunk=16), []
    for _ in range(10):
        lines += file.read()
    assert lines == [b"one", b"two"] and file.long_lines == 1


def test_what_is_no_file_is_said_and_is_not_waited_for(path):
    os.mkfifo(path)
    file = FollowedFile(path)
    assert file.read() == [] and file.problem == "lines is not a regular file"
    path.unlink()
    path.mkdir()
    assert file.read() == [] and "lines" in (file.problem or "")
    path.rmdir()
    path.write_bytes(b"one\n")
    assert file.read() == [b"one"] and file.problem is None
