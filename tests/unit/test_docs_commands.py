"""Every `graphtrain` command in the documentation exists, with the options that it is given."""

import re
import shlex
from pathlib import Path

import click
import pytest

from graphtrain.cli import _root

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^ *```console\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def commands(page):
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if prompt := re.match(r" *[\w-]*\$ (?:\w+=\S+ )*(graphtrain .*)", line):
                words = shlex.split(prompt[1], comments=True)
                end = min(words.index(one) if one in words else 99 for one in "|&>")
                yield words[1:end]


def parse(words):
    """Parse words as click would, without converting values or calling anything."""
    command, context = _root, click.Context(_root, info_name="graphtrain")
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        name, *rest = words
        if command.name == "plan" and command.get_command(context, name) is None:
            from graphtrain.cli.plan_show import show as command
        else:
            command, words = command.resolve_command(context, words)[1], rest
        context = click.Context(command, parent=context, **command.context_settings)
    command.make_parser(context).parse_args(list(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page):
    for words in commands(page):
        parse(words)


def test_a_wrong_option_is_noticed():
    with pytest.raises(click.NoSuchOption):
        parse(["plan", "a.toml", "--blames"])
    with pytest.raises(click.UsageError):
        parse(["cache", "lost"])
