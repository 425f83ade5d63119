"""Commands of guides that compile: they work in the order of their pages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHORT = "--set run.steps=2 --set run.learning_rate.warmup_steps=0"


def blocks(page, language):
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", (DOCS / page).read_text(), re.M | re.S)


def commands(page, *verbs):
    """Return the commands of a page that begin with `graphtrain VERB`, for one of the verbs."""
    lines = "".join(blocks(page, "console")).replace("\\\n", " ").splitlines()
    found = [line[2:] for line in lines if line.startswith("$ graphtrain ")]
    return [one for one in found if one.split()[1] in verbs]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Return a function that runs a command where the quickstart's data and a short run are."""
    place = tmp_path_factory.mktemp("guides")
    (place / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GRAPHTRAIN_CACHE": str(place / "cache"),
    }

    def run(command):
        ended = subprocess.run(
            command, shell=True, cwd=place, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    for command in commands("getting-started/quickstart.md", "data"):
        run(command)
    run(f"graphtrain run examples/quickstart.toml --compile {SHORT}")
    run.place = place
    return run


def test_the_quickstart_generates_and_exports(shell):
    generate, convert = commands("getting-started/quickstart.md", "generate", "convert")
    assert shell(generate).startswith("The quick")
    shell(convert)
    assert (shell.place / "quickstart-hf/config.json").exists()


def test_the_quickstart_resumes(shell):
    (command,) = commands("guides/resume-and-reshard.md", "run")[:1]
    assert "trained 3 steps" in shell(f"{command} {SHORT} --set run.steps=3")
