"""Commands of guides that need only estimates: they end as their page says."""

import re
import shlex

import pytest
from in_process import graphtrain
from places import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOES_NOT_FIT = {"guides/fit-in-memory.md"}  # pages whose example does not fit in memory


def estimates():
    for page in PAGES:
        for line in re.findall(r"^\$ (graphtrain .*--no-compile.*)$", page.read_text(), re.M):
            yield str(page.relative_to(ROOT / "docs")), line


@pytest.mark.parametrize(("page", "command"), list(estimates()))
def test_plans_of_guides(page, command, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = (ROOT / "docs" / page).read_text()
    for name, content in re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(content)  # files that the page shows by name
    monkeypatch.chdir(tmp_path)
    ended = graphtrain(*shlex.split(command)[1:])
    assert ended.status == (4 if page in DOES_NOT_FIT else 0), ended.err
    if page in DOES_NOT_FIT:
        quoted = re.findall(r"^(--set \S+) +.*estimate$", text, re.M)
        assert quoted and all(change in ended.out for change in quoted)
