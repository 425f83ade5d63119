"""The documentation builds as a site: every page, link and anchor, without a download."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = ["build", "--strict", "--config-file", "docs/site/mkdocs.yml", "--site-dir", folder]
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists(), page


def test_pages_load_nothing_from_the_network(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert {link for page in pages for link in FETCHED.findall(page.read_text())} == set()


def test_the_search_finds_settings(site):
    index = (site / "search/search_index.json").read_text()
    assert "gradient_reduction" in index and "KV cache" in index
