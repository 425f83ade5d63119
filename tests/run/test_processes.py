"""One run in two processes of four devices, as on two hosts."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

import numpy as np
import pytest
from places import CUBE, Place

from graphtrain.data.indexed.writer import IndexedWriter

TWO = ["--target", "cpu:2x4", *CUBE[2:]]
STOPPED = 128 + signal.SIGTERM


@pytest.fixture(scope="session")
def compiled_for_two(compiled, tmp_path_factory, corpus) -> Place:
    from places import furnish

    path = tmp_path_factory.mktemp("two")
    furnish(path, corpus)
    place = Place(path, compiled)
    place.command("compile", "config.toml", *TWO)
    return place


def ranks(place: Place, *words: str, caches: Sequence[Place] = ()) -> list[subprocess.Popen[str]]:
    """Begin both processes of a run, each with a cache of its own if given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--coordinator", meeting, "--processes", "2", "--rank"]
    return [
        (caches[rank] if caches else place).start(
            "run", "config.toml", *TWO, *words, *options, str(rank)
        )
        for rank in (0, 1)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    both = [process.communicate(timeout=200) for process in processes]
    return [process.returncode for process in processes], [out + err for out, err in both]


def own_words(told: str) -> list[str]:
    """What a process said, without the words of Gloo's lines, which its threads interleave."""
    line = "[Gloo] Rank is connected to peer ranks. Expected number of connected peer ranks is :"
    words = [re.escape(word) for word in line.split()]
    return re.sub("|".join([*words, "ranks", r"\d+"]), "", told).split()


def wait_for_step(place: Place, step: int, directory: str = "run") -> None:
    deadline = time.monotonic() + 100
    while not any(number >= step for number, _, _ in place.curve(directory)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_processes_train_as_one_does(place: Place, compiled_for_two):
    # At a rate so low that rounding, which differs between processes, does not grow.
    slowly = ["--set", "run.learning_rate.peak=1e-4"]
    statuses, told = ended(ranks(place, *slowly))
    assert statuses == [0, 0], told
    assert "trained 16 steps" in told[0] and not own_words(told[1])
    place.command("run", "config.toml", *CUBE, *slowly, "--set", "run.directory=alone")
    together, alone = place.curve(), place.curve("alone")
    assert len(together) == 16
    for mine, other in zip(together, alone, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    validation = [[one["validation_loss"] for one in place.journal(run) if "validation_loss" in one]
                  for run in ("run", "alone")]  # fmt: skip
    assert validation[0] == pytest.approx(validation[1], rel=1e-5)


def test_a_signal_to_one_stops_both_after_the_same_step_and_one_process_goes_on(
    place: Place, compiled_for_two
):
    many = ["--set", "run.steps=400", "--set", "run.save_every=1000"]
    both = ranks(place, *many)
    wait_for_step(place, 3)
    both[1].send_signal(signal.SIGTERM)
    statuses, told = ended(both)
    assert statuses == [STOPPED, STOPPED], told
    stopped = len(place.curve())
    assert 3 <= stopped < 400 and f"after step {stopped}; saved" in told[0]
    more = ["--set", f"run.steps={stopped + 4}"]
    place.command("run", "config.toml", *CUBE, *more)
    assert [step for step, _, _ in place.curve()] == list(range(1, stopped + 5))


def test_a_process_that_dies_ends_the_other(place: Place, compiled_for_two):
    both = ranks(place, "--set", "run.steps=100000", "--set", "run.save_every=100000")
    wait_for_step(place, 3)
    both[1].kill()
    statuses, told = ended(both)
    assert statuses[0] not in (0, None) and statuses[1] == -signal.SIGKILL, told


def test_executables_that_differ_stop_both_before_they_compute(
    place: Place, tmp_path, compiled_for_two
):
    other = Place(place.path, tmp_path / "other")
    other.command("compile", "config.toml", *TWO)
    statuses, told = ended(ranks(place, caches=[place, other]))
    assert statuses == [2, 2], told
    for one in told:
        assert (
            "ranks 0 and ranks 1 found different executables of init: the same key was "
            "compiled twice" in one
        )
    assert not os.path.exists(place.path / "run" / "metrics.jsonl")


def test_what_is_missing_on_one_is_missing_for_all(place: Place, tmp_path, compiled_for_two):
    other = Place(place.path, tmp_path / "other")
    statuses, told = ended(ranks(place, caches=[place, other]))
    assert statuses == [3, 3], told
    assert "error: rank 1: no compiled init step: " in told[0]


def test_another_number_of_processes_is_refused(place: Place):
    _, err = place.command("run", "config.toml", *TWO, status=2)
    assert (
        "cpu:2x4 requires 2 processes, one for each host, but this run has 1; start them with"
        in err
    )
    _, err = place.command("run", "config.toml", *TWO, "--rank", "0", status=2)
    assert "a distributed run also requires coordinator, processes" in err


def test_a_token_outside_the_vocabulary_is_reported_by_the_rank_that_reads_it_and_ends_both(
    place: Place, compiled_for_two
):
    documents = [np.full(32, 7) for _ in range(128)]
    documents[50][16] = 300  # the vocabulary of the model has 264
    with IndexedWriter(place.path / "odd", 400) as writer:
        for document in documents:
            writer.append(document)
    statuses, told = ended(ranks(place, "--set", "run.data.train=odd"))
    named = ["document 50 contains token 300, which is outside" in one for one in told]
    assert sorted(named) == [False, True], told
    assert statuses[named.index(True)] == 2 and 0 not in statuses, told
