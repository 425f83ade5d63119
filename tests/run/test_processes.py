"""One run in two processes of four devices, as on two hosts."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from places import BLOCKED_LOADER, CUBE, PROGRESS, Place, meeting_address

from graphtrain.data.indexed.description import DatasetDescription
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


def ranks(
    place: Place,
    *words: str,
    caches: Sequence[Place] = (),
    starts: Mapping[int, list[str]] | None = None,
) -> list[subprocess.Popen[str]]:
    """Begin both processes of a run, each with a cache or a start of Python of its own if given."""
    options = ["--coordinator", meeting_address(), "--processes", "2", "--rank"]
    return [
        (caches[rank] if caches else place).start_python(
            *(starts or {}).get(rank, ["-m", "graphtrain"]),
            "run",
            "config.toml",
            *TWO,
            *words,
            *options,
            str(rank),
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
    many = ["--set", "run.steps=400", "--set", "run.checkpoints.local_every=1000"]
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


LONG = ["--set", "run.steps=100000", "--set", "run.checkpoints.local_every=100000"]
# Shorter than the default of a minute, to notice a hang sooner.
LONG += ["--set", "run.watchdog.step_timeout=6.0"]
LOST = 75  # status of a run that lost a rank

FAILING_LOADER = BLOCKED_LOADER.replace(
    "threading.Event().wait()",
    "raise __import__('graphtrain.errors').errors.DataError('row 7 cannot be read')",
)


def only_message(err: str) -> str:
    """The one line on stderr besides those of progress: no traceback, no words of XLA."""
    lines = messages(err)
    assert len(lines) == 1, err
    return lines[0]


def messages(err: str) -> list[str]:
    """Lines on stderr besides those of progress."""
    return [line for line in err.splitlines() if not line.startswith(PROGRESS)]


def ended_with_errors(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Statuses, and what was said on stderr; Gloo's threads write to stdout, in fragments."""
    errors = [process.communicate(timeout=200)[1] for process in processes]
    return [process.returncode for process in processes], errors


def test_a_rank_that_does_not_start_is_named(place: Place):
    waiting = ["--processes", "2", "--rank", "0", "--set", "run.watchdog.join_timeout=1"]
    alone = ["--coordinator", meeting_address(), *waiting]
    _, err = place.command("run", "config.toml", *TWO, *alone, status=LOST)
    assert "rank 1 did not join within 1 s (rank 0 did); see" in only_message(err)


COMPILING = """
import threading
from pathlib import Path
from graphtrain.compile import driver
from graphtrain.errors import CacheError

def compile_tasks(*arguments, **others):
    Path("compiling").touch()
    if Path("fails").exists():
        raise CacheError("the cache is full")
    threading.Event().wait()

driver.compile_tasks = compile_tasks
from graphtrain.cli import main
main()
"""


def compiling(place: Place, tmp_path: Path) -> list[subprocess.Popen[str]]:
    """Begin both processes, of which rank 1 has all programs; return when rank 0 compiles."""
    caches = [Place(place.path, tmp_path / "empty"), place]
    words = ["--compile", "--set", "run.watchdog.step_timeout=3.0"]
    both = ranks(place, *words, caches=caches, starts={0: ["-c", COMPILING]})
    deadline = time.monotonic() + 60
    while not (place.path / "compiling").exists():
        assert time.monotonic() < deadline and both[0].poll() is None, ended(both)
        time.sleep(0.05)
    return both


@pytest.mark.parametrize(
    ("sent", "words"),
    [(signal.SIGKILL, "rank 0 has ended"), (signal.SIGSTOP, "rank 0 no longer responds")],
)
def test_a_rank_that_is_lost_while_it_compiles_is_named_and_ends_the_other(
    place: Place, compiled_for_two, tmp_path, sent, words
):
    both = compiling(place, tmp_path)
    both[0].send_signal(sent)
    _, err = both[1].communicate(timeout=120)
    both[0].kill()
    both[0].communicate()
    assert both[1].returncode == LOST, err
    message = only_message(err)
    assert message.startswith(f"error: {words}") and message.endswith("; start the run again")


def test_an_error_of_a_rank_that_compiles_is_that_of_all(place: Place, compiled_for_two, tmp_path):
    (place.path / "fails").touch()
    statuses, told = ended_with_errors(compiling(place, tmp_path))
    assert statuses == [2, 2], told
    assert "error: the cache is full" in told[0]
    assert only_message(told[1]) == "error: rank 0 ended with an error: the cache is full"


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_is_named_and_ends_the_other(
    place: Place, compiled_for_two, lost, sent
):
    both = ranks(place, *LONG)
    wait_for_step(place, 3)
    both[lost].send_signal(sent)
    out, err = both[1 - lost].communicate(timeout=120)
    both[lost].kill()
    both[lost].communicate()
    assert both[1 - lost].returncode == LOST, out + err
    message = only_message(err)
    assert message.startswith("error: ") and f"rank {lost} no longer responds" in message
    assert "stacks are in run/stacks; start the run again to resume" in message
    stacks = (place.path / f"run/stacks/rank-{1 - lost}.txt").read_text()
    assert "most recent call first" in stacks


def test_a_rank_whose_loader_blocks_is_named_and_ends_both(place: Place, compiled_for_two):
    both = ranks(place, *LONG, starts={1: ["-c", BLOCKED_LOADER]})
    statuses, told = ended_with_errors(both)
    assert statuses == [LOST, LOST], told
    for rank, each in enumerate(told):
        message = only_message(each)
        assert "rank 1 is behind, stalled in step 6: waiting for the data loader" in message
        assert "in the first collective of step 6 between processes (all-" in message
        assert (place.path / f"run/stacks/rank-{rank}.txt").exists()
    assert "in block" in (place.path / "run/stacks/rank-1.txt").read_text()


def test_an_error_of_one_rank_is_that_of_all(place: Place, compiled_for_two):
    statuses, told = ended_with_errors(ranks(place, *LONG, starts={1: ["-c", FAILING_LOADER]}))
    assert statuses == [2, 2], told
    assert "error: rank 1 ended with an error: row 7 cannot be read" in only_message(told[0])
    assert only_message(told[1]) == "error: row 7 cannot be read"


# Writes fail as on a full disk; those to pipes do not.
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
from graphtrain.cli import main
main()
"""


def test_a_rank_that_cannot_write_its_part_of_a_checkpoint_is_named(place: Place, compiled_for_two):
    # Rank 0 writes all weights: rank 1 holds copies of them, under data parallelism.
    saving = [*LONG, "--set", "run.checkpoints.local_every=3"]
    statuses, told = ended_with_errors(ranks(place, *saving, starts={0: ["-c", FULL_DISK]}))
    assert statuses == [2, 2], told
    *others, message = messages(told[0])
    assert message.startswith("error: run/checkpoints cannot be written; free disk")
    # The ledger of the cache grows with every run of these tests, at last beyond the limit.
    ledger = "warning: the measurements of this run were"
    assert all(line.startswith(ledger) for line in others), others
    assert "rank 0 ended with an error: run/checkpoints cannot" in only_message(told[1])


def test_a_single_process_that_hangs_is_ended(place: Place):
    words = ["run", "config.toml", *LONG]
    process = place.start_python("-c", BLOCKED_LOADER, *words)
    _, err = process.communicate(timeout=200)
    assert process.returncode == LOST, err
    assert "rank 0 is stalled in step 6: waiting for the data loader; stacks are in" in err


def test_rank_0_listens_only_where_the_others_look_for_it(place: Place, compiled_for_two):
    both = ranks(place, *LONG)
    wait_for_step(place, 1)
    meeting = cast("list[str]", both[0].args)[-5]
    port = int(meeting.rpartition(":")[2])
    addresses = listening_addresses(port)
    for process in both:
        process.kill()
        process.communicate()
    # 127.0.0.1, which gRPC may bind as an IPv4-mapped address of IPv6.
    assert addresses and all(address.endswith("0100007F") for address in addresses)


def listening_addresses(port: int) -> set[str]:
    """Addresses in hexadecimal on which some process listens, by /proc/net."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    local = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return {address for address, number in local if int(number, 16) == port}


def test_a_signal_during_an_evaluation_saves_and_the_evaluation_is_repeated(
    place: Place, compiled_for_two
):
    words = ["--set", "run.steps=4", "--set", "run.evaluate_every=2"]
    alone = [*words, "--set", 'run.directory="alone"']
    assert ended(ranks(place, *alone))[0] == [0, 0]
    both = ranks(place, *words, starts={r: ["-c", SIGNALLED_EVALUATION] for r in (0, 1)})
    statuses, told = ended(both)
    assert statuses == [STOPPED, STOPPED], told
    assert "stopped by SIGTERM after step 2; saved" in told[0]
    assert not any("validation_loss" in record for record in place.journal())
    assert ended(ranks(place, *words))[0] == [0, 0]
    assert losses(place, "run") == losses(place, "alone")


SIGNALLED_LOADING = """
import contextlib, signal
from graphtrain.run import signals, train

@contextlib.contextmanager
def signalled():
    request = signals.StopRequest()
    request.signal = signal.SIGTERM
    yield request

train.stop_requests = signalled
train.DataCheck = None  # the next phase of loading, which must not begin
from graphtrain.cli import main
main()
"""


def test_a_signal_while_programs_are_loaded_ends_the_run_before_the_next_phase(place: Place):
    process = place.start_python("-c", SIGNALLED_LOADING, "run", "config.toml")
    out, err = process.communicate(timeout=200)
    assert process.returncode == STOPPED, err
    assert "stopped by SIGTERM before step 1" in out


SIGNALLED_EVALUATION = """
import os, signal, sys
from graphtrain.run import evaluate
loss_of = evaluate.validation_loss

def signalled(*arguments, should_stop):
    def stop(batch):
        if batch == 1 and sys.argv[-1] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return should_stop(batch)
    loss = loss_of(*arguments, should_stop=stop)
    assert loss is None, "the evaluation was not given up"
    return loss

evaluate.validation_loss = signalled
from graphtrain.cli import main
main()
"""


def losses(place: Place, directory: str) -> list[tuple]:
    return [
        (one["step"], one.get("loss"), one.get("grad_norm"), one.get("validation_loss"))
        for one in place.journal(directory)
    ]


def test_executables_that_differ_stop_both_before_they_compute(
    place: Place, tmp_path, compiled_for_two
):
    other = Place(place.path, tmp_path / "other")
    other.command("compile", "config.toml", *TWO)
    statuses, told = ended(ranks(place, caches=[place, other]))
    assert statuses == [2, 2], told
    for one in told:
        assert (
            "rank 0 and rank 1 found different executables of init: the same key was "
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
    description = DatasetDescription(
        tokenizer="bytes", tokenizer_digest="", tokenizer_file=None, vocab=264, eod=None,
        documents=128, tokens=4096, largest=7,  # not so, or the first check would refuse it
    )  # fmt: skip
    (place.path / "odd.json").write_text(json.dumps(asdict(description)))
    statuses, told = ended(ranks(place, "--set", "run.data.train=odd"))
    assert statuses == [2, 2], told
    named = "document 50 contains token 300, which is outside"
    assert all(named in one for one in told), told
    # The rank that does not read the row names the other one.
    of_another = [re.search(r"error: rank (\d) ended with an error: ", one) for one in told]
    (reader,) = [rank for rank, found in enumerate(of_another) if found is None]
    assert [found[1] for found in of_another if found] == [str(reader)], told


LAST_SECOND = """
import os, signal, sys, time
from graphtrain import cli
from lowering.machine.target import Target
from lowering.xla import distributed, joining

rank, address = int(sys.argv[1]), sys.argv[2]
member = joining.Membership(rank, 2, address)
joining.initialize(member, Target.parse("cpu:2x1"), join_timeout=60)
distributed.all_gather_text("done")
cli._status_at_exit.append(0)
if rank == 0:
    os.kill(os.getpid(), signal.SIGTERM)  # XLA looks for it once a second
    time.sleep(1.5)
"""


def test_a_signal_in_the_last_second_keeps_no_process_from_its_end(tmp_path):
    """JAX's preemption service would wait three minutes for the one of a process that has left."""
    place, address = Place(tmp_path, tmp_path), meeting_address()
    ranks = [place.start_python("-c", LAST_SECOND, str(rank), address) for rank in range(2)]
    for process in ranks:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
