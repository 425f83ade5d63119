"""Ranks of Ascend that are killed or stopped during a run of the command."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from places import BLOCKED_LOADER, PROGRESS, Place, meeting_address

TWO = ["--target", "ascend-cpu:2", "--set", "program.mesh.data=2"]
LONG = ["--set", "run.steps=100000", "--set", "run.checkpoints.local_every=100000"]
LONG += ["--set", "run.watchdog.step_timeout=6.0"]
LOST = 75  # status of a run that lost a rank

pytestmark = [
    pytest.mark.usefixtures("compiled_quickly"),
    pytest.mark.skipif(
        importlib.util.find_spec("mindspore") is None,
        reason="needs pip install 'graphtrain[ascend]'",
    ),
]


def rank_processes(parent: int) -> dict[int, int]:
    """Process ids of the ranks that a run has started, by rank."""
    found = {}
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        lines = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        if environment.get("MS_ROLE") == "MS_WORKER":
            found[int(environment["RANK_ID"])] = int(child)
    return found


def lose_a_rank(place: Place, sent: signal.Signals, *then: signal.Signals) -> str:
    """Send a signal to rank 1 of a run after its second step; return what the run said."""
    place.command("compile", "config.toml", *TWO)
    process = place.start("run", "config.toml", *TWO, *LONG)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 3/"):
            break
    ranks = rank_processes(process.pid)
    os.kill(ranks[1], sent)
    for each in then:
        process.send_signal(each)
    _, err = process.communicate(timeout=120)
    assert process.returncode == LOST, err
    assert not any(Path(f"/proc/{each}").exists() for each in ranks.values())
    (message,) = [line for line in err.splitlines() if not line.startswith(PROGRESS)]
    return message


def test_a_rank_that_is_killed_is_named_and_the_others_write_their_stacks(cold: Place):
    assert "rank 1 has ended (SIGKILL" in lose_a_rank(cold, signal.SIGKILL)
    assert "most recent call first" in (cold.path / "run/stacks/rank-0.txt").read_text()


def test_a_rank_that_is_stopped_is_named_and_killed_and_the_others_write_their_stacks(
    cold: Place,
):
    message = lose_a_rank(cold, signal.SIGSTOP)
    assert "rank 1 is stopped (SIGSTOP), in step" in message and "run/stacks" in message
    assert "most recent call first" in (cold.path / "run/stacks/rank-0.txt").read_text()


def test_sigterm_ends_a_run_with_a_stopped_rank(cold: Place):
    assert "rank 1 is stopped" in lose_a_rank(cold, signal.SIGSTOP, signal.SIGTERM)


def test_a_process_whose_loader_blocks_is_named_when_the_collective_of_the_other_fails(
    cold: Place, monkeypatch: pytest.MonkeyPatch
):
    # MindSpore's collective gives up long before the watchdog would speak.
    monkeypatch.setenv("MS_CPU_COMM_OP_TIMEOUT", "5")
    two = ["--target", "ascend-cpu:2x1", "--set", "program.mesh.data=2"]
    cold.command("compile", "config.toml", *two)
    options = ["--coordinator", meeting_address(), "--processes", "2", "--rank"]
    both = [
        cold.start_python(*start, "run", "config.toml", *two, *LONG[:4], *options, str(rank))
        for rank, start in enumerate((["-m", "graphtrain"], ["-c", BLOCKED_LOADER]))
    ]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == LOST, err
        (message,) = [line for line in err.splitlines() if not line.startswith(PROGRESS)]
        assert "rank 1 is behind, stalled in step 6: waiting for the data loader" in message
        assert "MindSpore" not in message and "AllReduce" not in message
    for rank in (0, 1):
        stacks = (cold.path / f"run/stacks/rank-{rank}.txt").read_text()
        assert "most recent call first" in stacks
