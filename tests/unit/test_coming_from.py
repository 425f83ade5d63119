"""Tables of settings in docs/guides/coming-from agree with what an error says of each name."""

import re
from pathlib import Path

import pytest

from graphtrain.config.foreign_names import setting_for
from graphtrain.config.settings import known_settings

FOLDER = Path(__file__).parents[2] / "docs/guides/coming-from"


def rows(page):
    section = page.read_text().partition("\n## Settings\n")[2].partition("\n## ")[0]
    for line in re.findall(r"^\| (`.*) \|$", section, re.MULTILINE):
        names, settings = (re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[:2])
        yield names, settings


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_each_name_is_answered_with_the_setting_beside_it(page):
    found = list(rows(page))
    assert len(found) >= 25
    for names, settings in found:
        assert {tuple(one.split(".")) for one in settings} <= set(known_settings())
        for name, setting in zip(names, settings * len(names), strict=False):
            same_word = setting.rpartition(".")[2] == name
            answer = setting_for(("run", name))
            assert same_word or (answer and ".".join(answer)) == setting, (page.name, name)
