"""Errors in the arguments of commands have one voice, and help is complete."""

import click
import pytest
from in_process import graphtrain

from graphtrain.cli import _root


def groups(command, *names):
    if isinstance(command, click.Group):
        yield names
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from groups(command.get_command(context, name), *names, name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compil a.toml", "unknown command 'compil'; did you mean compile?"),
        ("plan serach a.toml", "unknown command 'serach'; did you mean search?"),
        ("data prepar", "unknown command 'prepar'; did you mean prepare?"),
        ("cache key lst", "unknown command 'lst'; did you mean ls?"),
        ("cache key x", "unknown command 'x'; the commands are ls, new, show, trust, untrust"),
        ("generate a b --token 5", "unknown option --token; did you mean --tokens?"),
        ("run a --zzz", "unknown option --zzz; see graphtrain run --help"),
        ("init book --steps 3", "unknown option --steps; see graphtrain init --help"),
        ("generate a b --tokens 0", "--tokens: should be a whole number, at least 1"),
        ("generate a b --temperature x", "--temperature: should be a number, at least 0"),
        ("generate a b --temperature nan", "--temperature: should be a number, at least 0"),
        ("data sample a --megabytes nan", "--megabytes: should be a number, at least 0"),
        ("cache gc --max-age-days inf", "--max-age-days: should be a number, at least 0"),
        ("generate a b --top-p 2", "--top-p: should be a number, above 0, at most 1"),
        ("generate a b --beams 1", "--beams: should be a whole number, at least 2"),
        ("generate a b --beams 2 --seed 3", "--beams leaves --seed without effect"),
        ("generate a b --length-penalty 0", "--length-penalty needs --beams"),
        ("generate a b --samples 2", "--samples needs --prompts"),
        (f"generate a b --prompts {__file__}", "--prompts leaves PROMPT without effect"),
        (f"generate a --prompts {__file__} --json", "--prompts leaves --json without effect"),
        ("generate a b --stream --json", "--stream leaves --json without effect"),
        (
            f"generate a --prompts {__file__} --samples 2 --temperature 0",
            "--samples are all the same with --temperature 0",
        ),
        ("generate a", "give a PROMPT, or a file of prompts with --prompts"),
        (
            "evaluate",
            "missing argument CONFIG|RUN; usage: graphtrain evaluate [OPTIONS] CONFIG|RUN",
        ),
        (
            "data prepare a",
            "missing option --output; usage: graphtrain data prepare [OPTIONS] INPUTS...",
        ),
        (
            "data prepare a --output b --text-document c",
            "--text-document: should be line, paragraph or file",
        ),
        (
            "data instruct a --output b --tokenizer c --template chatml",
            "unknown option --template; did you mean --chat-template?",
        ),
        ("plan show a --results b", "--results is only shown on a page; add --html FILE"),
        ("plan a --results b", "--results is only shown on a page; add --html FILE"),
        (
            "plan a --blame --no-compile",
            "--blame needs a compiled step, which has the causes of collectives; remove "
            "--no-compile",
        ),
        (
            "plan a --blame --no-compile --json",
            "--blame needs a compiled step, which has the causes of collectives; remove "
            "--no-compile",
        ),
        ("run a b", "got unexpected extra argument (b)"),
    ],
)
def test_wrong_arguments_are_one_line_in_our_words(line, message):
    outcome = graphtrain(*line.split())
    assert (outcome.status, outcome.err) == (2, f"error: {message}\n")


@pytest.mark.parametrize("names", list(groups(_root)), ids=" ".join)
def test_lists_of_commands_are_not_cut(names):
    listed = graphtrain(*names, "--help").out
    assert "Commands:" in listed
    assert "..." not in listed.partition("Commands:")[2]


def test_a_group_without_a_command_shows_its_help():
    outcome = graphtrain("data")
    assert outcome.status == 2
    assert "prepare" in outcome.err
