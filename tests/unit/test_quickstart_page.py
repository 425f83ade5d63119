"""The configuration on the quickstart's page is that of examples/quickstart.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_example():
    page = (ROOT / "docs/getting-started/quickstart.md").read_text()
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert tomllib.loads(shown) == tomllib.loads((ROOT / "examples/quickstart.toml").read_text())
