"""Which process of a run this is, by what starts it."""

import os
import threading
from types import SimpleNamespace

import jax
import pytest

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.xla import backend as xla
from lowering.xla import devices, distributed, lost_ranks
from lowering.xla.joining import Membership, membership

SLURM = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
SLICE = {"TPU_WORKER_HOSTNAMES": "t0.svc, t1.svc", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (SLURM, Membership(1, 2)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SLICE, Membership(1, 2, "t0.svc:8476")),
        (SLICE | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    ],
)
def test_who_starts_it_says_which_it_is(environ, expected):
    assert membership(environ) == expected


def test_what_is_given_comes_before_what_the_environment_says():
    given = membership(SLURM | SLICE, coordinator="host0:1", count=4, rank=3)
    assert given == Membership(3, 4, "host0:1")


def test_a_host_of_a_slice_that_knows_no_other_is_refused(monkeypatch):
    found = [SimpleNamespace(process_index=number // 4) for number in range(8)]
    monkeypatch.setattr(jax, "devices", lambda platform: found)
    monkeypatch.setattr(devices, "_configure_platform", lambda *_: None)
    with pytest.raises(
        LoweringError,
        match=r"on 2 hosts, .* one process on each host, .* number of processes and its rank",
    ):
        xla.devices(Target.parse("v5p:2x2x2"))


def test_an_error_of_this_process_keeps_its_status_when_the_others_end_first(monkeypatch):
    """A service that is lost while a rank reports its own error does not make it a lost peer."""
    ended = []
    monkeypatch.setattr(lost_ranks, "_own_status", [])
    monkeypatch.setattr(lost_ranks, "_WATCHDOG_START", 0)
    monkeypatch.setattr(lost_ranks, "is_watched", threading.Event())
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "service_state", lambda: SimpleNamespace(client=LostService()))
    monkeypatch.setattr(os, "_exit", end(ended))
    lost_ranks.wait_for_failed_ranks(3)
    with pytest.raises(SystemExit):
        lost_ranks.end_without_peers()
    assert ended == [3]


class LostService:
    def key_value_set(self, key, value):
        raise RuntimeError


def end(ended: list[int]):
    def exit_now(status: int):
        ended.append(status)
        raise SystemExit

    return exit_now
