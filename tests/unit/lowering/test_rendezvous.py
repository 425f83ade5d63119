"""Processes of a run that meet at rank 0 before JAX connects them; one is missing, or is lost."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lowering.errors import LoweringError, PeerLost
from lowering.machine import rendezvous
from lowering.machine.rendezvous import Meeting, joined, names
from sharding_rules.errors import UserError

PEER = """
import sys, threading
from lowering.machine.rendezvous import Meeting, joined

rank, count = map(int, sys.argv[2:])
with joined(Meeting(rank, count, sys.argv[1], sys.argv[1], 30.0, 2.0), sys.exit) as session:
    print("joined", flush=True)
    session.prepare(threading.Event().wait)
"""


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def never(reason: LoweringError) -> None:
    raise reason


def outcome(meeting: Meeting) -> str:
    """Join and leave; return the error."""
    try:
        with joined(meeting, never):
            return ""
    except LoweringError as error:
        return str(error)


def outcomes(ranks: list[int], count: int, join_timeout: float) -> list[str]:
    address = free_address()
    with ThreadPoolExecutor(len(ranks)) as pool:
        meetings = [Meeting(rank, count, address, address, join_timeout, 60.0) for rank in ranks]
        return list(pool.map(outcome, meetings))


def test_processes_that_all_join_go_on_at_once():
    began = time.monotonic()
    assert outcomes([0, 1, 2, 3], 4, 60.0) == [""] * 4
    assert time.monotonic() - began < 5


def test_every_process_names_the_ranks_that_did_not_join_and_those_that_did():
    for said in outcomes([0, 2], 4, 1.0):
        assert said.startswith("ranks 1 and 3 did not join within 1 s (ranks 0 and 2 did); see ")
        assert "run.watchdog.join_timeout" in said


def test_fewer_processes_suffice_after_the_limit_and_are_numbered_anew():
    address, prepared = free_address(), []

    def numbers(meeting: Meeting) -> tuple[int, int]:
        with joined(meeting, never) as session:
            session.prepare(lambda: prepared.append(session.count))
            return session.rank, session.count

    fewer = frozenset({3, 2})
    meetings = [Meeting(rank, 5, address, address, 1.0, 60.0, fewer) for rank in (0, 2, 4)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(numbers, meetings)) == [(0, 3), (1, 3), (2, 3)]
        late = outcome(meetings[1])
    assert prepared == [3, 3, 3] and late.startswith("rank 0 did not answer rank 2 within 1 s")
    meetings = [Meeting(rank, 5, free_address(), None, 1.0, 60.0, fewer) for rank in (0,)]
    assert outcome(meetings[0]).startswith("ranks 1, 2, 3 and 4 did not join")


def test_a_missing_rank_0_is_named_by_the_others():
    assert outcomes([1], 2, 1.0)[0].startswith("rank 0 did not answer rank 1 within 1 s; see what")


def test_two_processes_with_the_same_rank_are_refused():
    said = outcomes([0, 1, 1], 3, 1.0)
    assert "another process has joined as rank 1; every process needs its own --rank" in said


def test_processes_that_disagree_on_their_number_are_refused():
    address = free_address()
    host = Meeting(0, 2, address, address, 1.0, 60.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome, host)
        said = outcome(Meeting(2, 4, address, None, 1.0, 60.0))
        assert said == "rank 2 expects 4 processes, but rank 0 expects 2"
        assert waiting.result().startswith("rank 1 did not join")


def test_a_connection_of_another_program_is_no_process_of_the_run():
    address = free_address()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome, Meeting(0, 2, address, address, 30.0, 60.0))
        with connected(address) as other:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert other.recv(100) == b""
            assert outcome(Meeting(1, 2, address, None, 30.0, 60.0)) == ""
        assert waiting.result() == ""


def test_the_verdict_reaches_a_process_that_is_slow_to_read_it():
    address = free_address()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome, Meeting(0, 3, address, address, 1.0, 60.0))
        with connected(address) as slow:
            slow.sendall(b"graphtrain-rendezvous-3 1 3\n")
            for _ in range(15):  # until rank 0 has given up
                time.sleep(0.1)
                slow.sendall(b"beat\n")
            received = slow.recv(1 << 16).decode()
        assert "\nlost rank 2 did not join within 1 s (ranks 0 and 1 did);" in received
        assert waiting.result().startswith("rank 2 did not join")


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=20)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_address_in_use_is_an_error_of_rank_0():
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = f"127.0.0.1:{used.getsockname()[1]}"
        with pytest.raises(
            LoweringError, match=f"cannot listen at {address} .* in use; use another"
        ):
            outcome_or_raise(Meeting(0, 2, address, address, 1.0, 60.0))


def outcome_or_raise(meeting: Meeting) -> None:
    with joined(meeting, never):
        pass


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize(
    ("sent", "words"),
    [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "no longer responds: no heartbeat for ")],
)
def test_a_rank_lost_while_jax_connects_is_named_to_all_others(lost, sent, words):
    address, said = free_address(), [Future(), Future()]
    victim = subprocess.Popen(
        [sys.executable, "-c", PEER, address, str(lost), "3"], stdout=subprocess.PIPE, text=True
    )
    is_over = threading.Event()

    def stay(rank: int, message: Future) -> None:
        with joined(Meeting(rank, 3, address, address, 30.0, 2.0), message.set_result):
            is_over.wait(30)

    others = [rank for rank in range(3) if rank != lost]
    with ThreadPoolExecutor(2) as pool:
        try:
            waiting = [pool.submit(stay, *each) for each in zip(others, said, strict=True)]
            assert victim.stdout is not None and victim.stdout.readline() == "joined\n"
            os.kill(victim.pid, sent)
            for message in said:
                assert str(message.result(30)).startswith(f"rank {lost} {words}")
        finally:
            is_over.set()
            victim.kill()
            victim.communicate()
        for each in waiting:
            each.result(30)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(143), "rank 1 has ended while the processes connected; see what it printed"),
        (RuntimeError("no route"), "rank 1 could not connect to the others: no route"),
    ],
)
def test_a_rank_that_ends_by_itself_while_jax_connects_is_named(monkeypatch, error, said):
    monkeypatch.setattr(rendezvous, "_VERDICT_SECONDS", 0.5)
    address, message = free_address(), Future()

    def fail() -> None:
        with joined(Meeting(1, 2, address, None, 30.0, 60.0), never):
            raise error

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        with joined(Meeting(0, 2, address, address, 30.0, 60.0), message.set_result):
            assert str(message.result(20)) == said
        assert isinstance(failing.exception(20), type(error))


def prepared(meeting: Meeting, action: Callable[[], None]) -> float:
    """Join and run an action; return when all others had run theirs."""
    with joined(meeting, never) as session:
        session.prepare(action)
        return time.monotonic()


def test_all_wait_for_the_rank_that_prepares_longest_beyond_the_time_to_join():
    address, ended = free_address(), []

    def work() -> None:
        time.sleep(1.5)
        ended.append(time.monotonic())

    actions = [lambda: None, work, lambda: None]
    meetings = [Meeting(rank, 3, address, address, 0.5, 60.0) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert min(pool.map(prepared, meetings, actions)) >= ended[0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_lost_while_it_prepares_is_named_to_those_that_wait(lost):
    address, reason = free_address(), Future()
    victim = subprocess.Popen(
        [sys.executable, "-c", PEER, address, str(lost), "2"], stdout=subprocess.PIPE, text=True
    )

    def wait() -> None:
        meeting = Meeting(1 - lost, 2, address, address, 30.0, 60.0)
        with joined(meeting, reason.set_result) as session:
            session.prepare(lambda: None)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert victim.stdout is not None and victim.stdout.readline() == "joined\n"
        victim.kill()
        assert str(reason.result(20)).startswith(f"rank {lost} has ended while the pro")
        assert isinstance(waiting.exception(20), PeerLost)
    victim.communicate()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_rank_that_prepares_ends_the_others_with_it(failing):
    address, reasons = free_address(), [Future(), Future()]

    def fail() -> None:
        raise UserError("train failed: no\nsecond line")

    def take_part(rank: int, reason: Future) -> None:
        with joined(Meeting(rank, 3, address, address, 30.0, 60.0), reason.set_result) as session:
            session.prepare(fail if rank == failing else lambda: None)

    others = [rank for rank in range(3) if rank != failing]
    with ThreadPoolExecutor(3) as pool:
        own = pool.submit(take_part, failing, Future())
        for rank, reason in zip(others, reasons, strict=True):
            pool.submit(take_part, rank, reason)
        assert str(own.exception(20)) == "train failed: no\nsecond line"
        for reason in reasons:
            error = reason.result(20)
            assert str(error) == f"rank {failing} ended with an error: train failed: no"
            assert error.exit_status == 2


def test_a_rank_lost_before_all_have_joined_is_named():
    address = free_address()
    victim = subprocess.Popen([sys.executable, "-c", PEER, address, "1", "3"])
    host = Meeting(0, 3, address, address, 30.0, 2.0)
    threading.Timer(1.0, victim.kill).start()
    with pytest.raises(PeerLost, match="rank 1 has ended while the processes connected"):
        outcome_or_raise(host)
    victim.wait()


def test_ranks_are_listed_up_to_a_limit():
    assert names([3]) == "rank 3"
    assert names([0, 1]) == "ranks 0 and 1"
    assert names(range(30)).endswith("18, 19 and 10 more")
