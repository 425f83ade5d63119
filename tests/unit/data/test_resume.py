"""A preparation that was killed goes on from what is on the disk, and makes the same files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TEXTS = [f"document {i}: the quick brown fox jumps over {i * i} lazy dogs" for i in range(200)]

# Counts the documents it sees; kills the process at one of them, the second time it comes by
# where a tokenizer is learned first.
HOOK = """
import os, signal
seen = []
def count(text):
    seen.append(text)
    with open("seen", "a") as file:
        file.write("x")
    if seen.count(text) == int(os.environ["TIMES"]) and text.startswith("document 150:"):
        os.kill(os.getpid(), signal.SIGKILL)
    return text
"""
PROGRAM = """
import sys
from graphtrain.data.prepare import splits
from graphtrain.data.readers import records
from graphtrain.data.prepare.text import prepare
records.GROUP_BYTES, splits._SAVE_EVERY = 900, 0.0
prepare([sys.argv[1]], sys.argv[2], sys.argv[3], clean=["hook:count"], test=0.1, workers=1)
"""


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lease"}


def run(place: Path, *arguments: str | Path, times: int) -> tuple[int, int]:
    """The exit status of a preparation, and how many documents it saw."""
    (place / "seen").write_text("")
    environment = os.environ | {"TIMES": str(times), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    status = subprocess.run(command, cwd=place, env=environment).returncode
    return status, len((place / "seen").read_text())


@pytest.mark.parametrize(("tokenizer", "times"), [("bytes", 1), ("sentencepiece:300", 2)])
def test_a_killed_preparation_goes_on(make_corpus, tmp_path, tokenizer, times):
    (tmp_path / "hook.py").write_text(HOOK)
    corpus = make_corpus(TEXTS)
    status, seen = run(tmp_path, corpus, "killed", tokenizer, times=times)
    assert status == -signal.SIGKILL
    assert not list((tmp_path / "killed").glob("*.idx"))
    assert (tmp_path / "killed" / "train.bin.partial").stat().st_size > 1000

    again, seen_again = run(tmp_path, corpus, "killed", tokenizer, times=9)
    assert again == 0
    assert seen_again < 80  # of 200: neither those on the disk, nor any for the tokenizer
    assert seen > 150

    run(tmp_path, corpus, "whole", tokenizer, times=9)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_partial_files_of_another_request_are_not_used(make_corpus, tmp_path):
    (tmp_path / "hook.py").write_text(HOOK)
    run(tmp_path, make_corpus(TEXTS), "killed", "bytes", times=1)
    other = make_corpus([text[::-1] for text in TEXTS])
    assert run(tmp_path, other, "killed", "bytes", times=9) == (0, 200)
    run(tmp_path, other, "whole", "bytes", times=9)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_partial_file_that_lost_its_end_is_not_used(make_corpus, tmp_path):
    (tmp_path / "hook.py").write_text(HOOK)
    corpus = make_corpus(TEXTS)
    run(tmp_path, corpus, "killed", "bytes", times=1)
    os.truncate(tmp_path / "killed" / "train.bin.partial", 500)
    assert run(tmp_path, corpus, "killed", "bytes", times=9) == (0, 200)
