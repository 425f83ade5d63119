"""A test that should run and is skipped fails (tests/skips.py)."""

import subprocess
import sys
from pathlib import Path

import pytest
import skips

TESTS = Path(skips.__file__).parent
FILE = """
import pytest
def test_a_reason_of_the_table():
    pytest.skip("needs an attached GPU")
def test_another_reason():
    pytest.skip("no package")
"""
MODULE = "import pytest; pytest.importorskip('no_such_package')"


def pytest_in(path: Path, *words: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "skips", "-c", "/dev/null", *words, path]
    environment = {"PYTHONPATH": str(TESTS)}
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("text", "words", "want"),
    [
        (FILE, [], "2 skipped"),
        (FILE, ["--no-unexpected-skips"], "1 failed, 1 skipped"),
        (MODULE, [], "1 skipped"),
        (MODULE, ["--no-unexpected-skips"], "1 error"),
    ],
)
def test_a_skip_for_no_reason_of_the_table_fails_where_it_is_asked_for(tmp_path, text, words, want):
    (tmp_path / "test_file.py").write_text(text)
    assert f"{want} in " in pytest_in(tmp_path / "test_file.py", *words)
