"""The pages of docs/reference that are made from the code are up to date and complete."""

import click
import pytest
import reference
from errors_page import error_classes

from graphtrain.cli import _root
from graphtrain.cli.plan_lock import _DIFFERS
from graphtrain.cli.plan_show import DOES_NOT_FIT
from graphtrain.errors import EXIT_STATUSES


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_committed_page_is_what_the_code_makes(name):
    assert (reference.FOLDER / name).read_text() == reference.PAGES[name](), "run: make reference"


def test_every_command_and_option_is_on_its_page():
    page = (reference.FOLDER / "commands.md").read_text()
    sections = dict(part.partition("\n")[::2] for part in page.split("# ") if part)
    tree = click.Context(_root, info_name="graphtrain").to_info_dict()["command"]
    for name, options in options_of(tree, ""):
        assert {option for option in options if f"`{option}`" not in sections[name]} == set(), name


def options_of(command, path):
    for name, inner in command.get("commands", {}).items():
        inner_path = f"{path} {name}".strip()
        options = [one for one in inner["params"] if one["param_type_name"] == "option"]
        yield inner_path, {name for one in options for name in one["opts"]} - {"--help", "-h"}
        yield from options_of(inner, inner_path)


def test_every_exit_status_has_a_meaning():
    used = {one.exit_status for one in error_classes()} | {DOES_NOT_FIT, _DIFFERS}
    assert set(map(str, used)) <= EXIT_STATUSES.keys()
