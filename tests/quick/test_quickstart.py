"""The commands of the quickstart do what its page says, and `make quickstart` runs them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from graphtrain.run.metrics import METRICS, read_journal

BLOCK = re.compile(r"^```console\n(.*?)^```", re.M | re.S)


# Metrics that a run asks for, of uploads, float16, DPO, of mixtures of experts, and of tasks.
OTHER_METRICS = {"parameter_norm.MODULE", "update_norm.MODULE", "averaged_validation_loss",
                 "margin", "accuracy", "balance_loss", "router_z_loss", "expert_load_max",
                 "expert_load_min", "dropped_choices", "mtp_loss", "loss_scale", "skipped_steps",
                 "upload_lag_steps", "spike", "TASK/METRIC"}  # fmt: skip


def commands(page: str) -> list[str]:
    blocks = BLOCK.findall((ROOT / page).read_text())
    return [line[2:] for block in blocks for line in block.splitlines() if line[:2] == "$ "]


PAGE = "docs/getting-started/quickstart.md"
LATER = ("generate", "convert")  # tests/extras/test_guides.py: they compile two more graphs
COMMANDS = [command for command in commands(PAGE) if command.split()[1] not in LATER]


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def dry_run(target: str) -> str:
    """What make would run."""
    made = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return made.stdout.replace("\\\n", "")


def test_its_commands_train_a_model_better_than_a_bigram_model(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("GRAPHTRAIN_CACHE", None)
    outputs = {}
    for command in COMMANDS:
        ended = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        outputs[words(command)[1]] = ended.stdout
    assert {"data", "plan", "compile", "run", "evaluate"} == outputs.keys()
    assert "trained 300 steps" in outputs["run"]
    records = read_journal(tmp_path / "runs/quickstart")
    assert set().union(*records) == METRICS.keys() - OTHER_METRICS
    losses = re.findall(r"^validation loss.*: ([\d.]+)$", outputs["evaluate"], re.M)
    model, bigram = map(float, losses)
    assert model < bigram


def test_quickstart_runs_its_commands():
    recipe = [
        words(line)[1:] for line in dry_run("quickstart").splitlines() if "/graphtrain " in line
    ]
    assert recipe == [words(command)[1:] for command in COMMANDS]


@pytest.mark.parametrize("command", commands("README.md"))
def test_make_has_the_targets_that_the_readme_names(command):
    assert dry_run(words(command)[1])
