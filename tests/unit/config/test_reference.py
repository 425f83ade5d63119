"""docs/reference/settings.md is what `graphtrain config reference` prints, and complete."""

from pathlib import Path

from graphtrain.config.reference import reference
from graphtrain.config.settings import known_settings

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"


def test_the_page_is_made_from_the_code():
    # else: graphtrain config reference > docs/reference/settings.md
    assert PAGE.read_text() == reference()


def test_every_setting_is_on_the_page_with_its_meaning():
    rows = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    names = {row[0].strip("| `") for row in rows}
    assert names >= {
        path[-1] for path, node in known_settings().items() if "properties" not in node
    }
    assert [row for row in rows if not row[3].strip("| ")] == []
