"""Tab completion, as docs/getting-started/install.md sets it up."""

import re
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete, get_completion_class

from graphtrain.cli import _root

PAGE = Path(__file__).parents[2] / "docs/getting-started/install.md"


def completions(*words):
    *before, incomplete = words
    shell = ShellComplete(_root, {}, "graphtrain", "_GRAPHTRAIN_COMPLETE")
    return {item.value for item in shell.get_completions(list(before), incomplete)}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("pl",), "plan"),
        (("run", "--s"), "--set"),
        (("plan", "s"), "search"),
        (("plan", "--bl"), "--blame"),  # an option of plan show, whose name is left out
        (("plan", "a.toml", "--bl"), "--blame"),
        (("plan", "search", "--ver"), "--verify"),
    ],
)
def test_commands_and_options_are_completed(words, expected):
    assert expected in completions(*words)


def test_the_page_names_the_variable_and_shells_that_click_knows():
    named = re.findall(r"_GRAPHTRAIN_COMPLETE=(\w+)_source graphtrain", PAGE.read_text())
    assert named == ["bash", "zsh", "fish"]
    assert all(get_completion_class(shell) for shell in named)
