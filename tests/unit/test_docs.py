"""Pages link to pages that exist, and name files, settings and commands that exist."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from graphtrain.config.settings import holds_settings, known_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "cache/README.md"])
TABLES = {path[-1] for path, node in known_settings().items() if "properties" in node}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def pages_in(node) -> Iterator[str]:
    for inner in node.values() if isinstance(node, dict) else node:
        if isinstance(inner, str):
            yield inner
        else:
            yield from pages_in(inner)


def test_the_navigation_has_every_page_once():
    navigation = yaml.safe_load((ROOT / "docs/site/mkdocs.yml").read_text())["nav"]
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages_in(navigation)) == sorted(pages)


def test_the_architecture_page_names_every_folder():
    page = (ROOT / "docs/contributing/layout.md").read_text()
    modules = [*ROOT.glob("graphtrain/*/*.py"), *ROOT.glob("lowering/*/*.py")]
    assert {file.parent for file in modules if f"`{file.parent.name}/`" not in page} == set()


def test_the_install_page_names_every_extra():
    page = (ROOT / "docs/getting-started/install.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [one for one in project["optional-dependencies"] if f"`{one}`" not in page] == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_page_says_what_has_run_on_hardware(page):
    (paragraph,) = re.findall(
        r"\*\*What has run on hardware:\*\*(.*?)\n\n", (ROOT / page).read_text(), re.DOTALL
    )
    for device in ("CPU", "GPU", "TPU", "Trainium", "Ascend"):
        assert device in paragraph


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_of_the_tree_exist(page):
    named = re.findall(
        r"(?<![\w/.])((?:graphtrain|lowering|sharding_rules|tests|examples)/[\w/.-]+\.\w+)",
        page.read_text(),
    )
    to_write = {"sharding_rules/presets/columns.toml"}  # by the reader of docs/guides/sharding.md
    assert [path for path in named if not (ROOT / path).exists() and path not in to_write] == []


MISSPELT = {"program.model.haeds", "program.model.hidden_size"}  # in examples of errors


def is_setting(path: tuple[str, ...]) -> bool:
    """Return whether a path is a setting, or is in a table of the user's own names."""
    for depth in range(len(path), 0, -1):
        if (node := known_settings().get(path[:depth])) is not None:
            return depth == len(path) or ("properties" not in node and holds_settings(node))
    return False


def dotted(text: str) -> Iterator[str]:
    yield from re.findall(r"(?<![\w./-])((?:program|run)(?:\.[a-z_0-9]+)+)(?![\w(*])", text)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_settings_exist(page):
    known = {("program", "model", "preset"), ("run", "log")}  # run.log is a file
    paths = {tuple(found.split(".")) for found in dotted(page.read_text())}
    unknown = {path for path in paths - known if not is_setting(path)}
    assert {".".join(path) for path in unknown} - MISSPELT == set()


def settings_in(table: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from settings_in(value, (*path, key))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_settings_in_snippets_exist(page):
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        document = tomllib.loads(block)
        if set(document) <= {"program", "run"}:
            stand_ins = {("program", "model", "preset"), ("run", "data", "directory")}
            paths = set(settings_in(document)) - stand_ins
            assert {path for path in paths if not is_setting(path)} == set(), block
