"""graphtrain doctor --measure: what it measures, when it refuses, and its processes."""

import signal
import sys
from collections import namedtuple
from dataclasses import replace

import psutil
import pytest
from click.testing import CliRunner

from graphtrain.api.measuring import core_speed, loops, machine, products, timing
from graphtrain.api.measuring.core_speed import CoreSpeed
from graphtrain.cli.doctor import command
from graphtrain.cost_model.machine_profile import (
    CACHED_BYTES,
    Measured,
    MeasuredFunction,
    this_machine,
)
from graphtrain.errors import PlanError
from lowering.hlo.loop_work import FACTORIZATIONS, FUNCTIONS

CPU = namedtuple("CPU", "user idle")
WORKER = """#!/bin/sh
echo 'measuring products' >&2
printf '{"long": "%0200000d"}' 0
echo 'measuring memory' >&2
exit $STATUS
"""


def test_every_kind_of_loops_is_measured(monkeypatch):
    fake = MeasuredFunction(1.0, 0.0, "", 1)
    for name in ("_function", "_moved"):
        monkeypatch.setattr(loops, name, lambda kind, *rest: replace(fake, kind=kind))
    measured = {one.kind for one in loops.measure_functions(0.0, lambda subject: None)}
    moves = {"transposed", "transposed_aliased", "transposed_alone", "permuted"}
    functions = {*FUNCTIONS.values(), *FACTORIZATIONS.values()}
    narrow = {"to_bfloat16", "reduce_bfloat16", "repeat_bfloat16"}
    assert measured == {*functions, *moves, *narrow, "arithmetic", "reduce"}


def test_products_of_large_operands_read_them_from_memory_and_small_ones_from_the_cache(
    monkeypatch,
):
    given = {}

    def measured(function, several):
        given[several[0][0].shape, several[0][1].shape] = several
        return Measured(1.0, 0.0)

    monkeypatch.setattr(products, "measure_in_turn", measured)
    for size in (64, 2048):
        products._measure("f32", 1, size, size, size, launch=0.0)
    (small,), large = given.values()
    assert small[0].nbytes + small[1].nbytes <= CACHED_BYTES
    assert sum(one.nbytes for operands in large for one in operands) >= 2**26
    addresses = {one.unsafe_buffer_pointer() for operands in large for one in operands}
    assert len(addresses) == 2 * len(large) > 2


def test_arguments_are_given_in_turn(monkeypatch):
    called = []
    monkeypatch.setattr(timing, "compiled", lambda function, *arguments: function)
    timing.measure_in_turn(called.append, [(0,), (1,), (2,)])
    assert called[:3] == [0, 1, 2] and {*called} == {0, 1, 2}
    assert called.count(2) > 1


def test_between_two_long_calls_with_the_same_arguments_are_all_others(monkeypatch):
    """Else the second reads from the cache what the first left there."""
    called, sets = [], 16
    monkeypatch.setattr(timing, "compiled", lambda function, *arguments: function)
    seconds = timing._RUN_SECONDS * 3 / 4
    monkeypatch.setattr(timing, "clock", lambda: lambda: seconds * len(called))
    measured = timing.measure_in_turn(called.append, [(value,) for value in range(sets)])
    assert measured.seconds == pytest.approx(seconds)
    assert called == [call % sets for call in range(len(called))]
    warm_up = sets + 2
    assert {*called[warm_up:]} == {*range(sets)}


def test_a_busy_machine_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "used_by_others", lambda before: 0.4)
    monkeypatch.setattr(machine, "_WATCHED_SECONDS", 0.0)
    result = CliRunner().invoke(command, ["--measure"])
    assert isinstance(result.exception, PlanError)
    assert "other processes use 40% of the cores" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_machine_that_others_use_meanwhile_is_refused_or_recorded(monkeypatch):
    shares = iter([0.0, 0.3, 0.3, None, None])
    monkeypatch.setattr(machine, "used_by_others", lambda before: next(shares))
    monkeypatch.setattr(machine, "_WATCHED_SECONDS", 0.0)
    monkeypatch.setattr(machine, "_in_process", lambda *rest: {"slow": 0.0})
    with pytest.raises(PlanError, match="other processes used 30% of the cores"):
        machine.measure_machine()
    recorded = machine.measure_machine(even_if_busy=True)
    assert recorded.source.endswith("while others used 30% of the cores")
    with pytest.raises(PlanError, match="does not say whether other processes use the cores"):
        machine.measure_machine()


def test_runs_are_taken_again_until_no_core_is_slowed(monkeypatch):
    """A neighbour slows one core at every second look; a second of one run is its number."""
    looks, runs = iter([1.0, 1.5, 1.0, 1.0]), iter([1.0, 2.0])
    monkeypatch.setattr(core_speed, "_on", lambda cpu: look)
    monkeypatch.setattr(core_speed.host, "usable_cpus", lambda: {0})
    is_full = CoreSpeed.is_full

    def looked(speed):
        nonlocal look
        look = next(looks)
        return is_full(speed)

    look = 1.0
    monkeypatch.setattr(CoreSpeed, "is_full", looked)
    monkeypatch.setattr(timing, "SPEED", CoreSpeed(patience=5.0))
    monkeypatch.setattr(timing, "_seconds", lambda *run: next(runs))
    assert timing._run(len, iter(()), 1) == (2.0, True)
    assert (timing.SPEED.runs, timing.SPEED.slow) == (1, 0)


def test_without_patience_a_run_with_a_slowed_core_counts_and_is_said(monkeypatch):
    speed = CoreSpeed(least={0: 1.0, 1: 2.0})  # one of them is slower by itself
    monkeypatch.setattr(core_speed, "_on", lambda cpu: 1.0 + 2 * cpu)
    monkeypatch.setattr(core_speed.host, "usable_cpus", lambda: {0, 1})
    monkeypatch.setattr(timing, "SPEED", speed)
    monkeypatch.setattr(timing, "_seconds", lambda *run: 7.0)
    assert timing._run(len, iter(()), 1) == (7.0, False)
    assert (speed.runs, speed.slow, speed.slow_share) == (1, 1, 1.0)
    assert "with slower cores in 100% of the runs" in this_machine(slow=speed.slow_share).source
    assert "slower" not in this_machine(slow=0.05).source


def test_the_median_is_of_the_runs_at_full_speed(monkeypatch):
    runs = iter([(3.0, True), (9.0, False), (1.0, True), (9.0, False), (2.0, True)])
    monkeypatch.setattr(timing, "_run", lambda *run: next(runs))
    monkeypatch.setattr(timing, "_seconds", lambda *run: 1.0)
    assert timing._measure(len, [()]).seconds == 2.0
    runs = iter([(float(seconds), False) for seconds in (5, 4, 6, 7, 8)])
    assert timing._measure(len, [()]).seconds == 4.0


def test_a_look_at_the_cores_leaves_the_thread_where_it_may_run():
    allowed = core_speed.host.usable_cpus()
    speed = CoreSpeed()
    speed.watch(0.0)
    speed.is_full()
    assert core_speed.host.usable_cpus() == allowed
    assert speed.least and all(0 < seconds < 1 for seconds in speed.least.values())


def test_only_the_cores_of_this_process_are_watched(monkeypatch):
    monkeypatch.setattr(machine.host, "usable_cpus", lambda: {1})
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine.os, "times", lambda: (0.0, 0.0, 2.0, 0.0, 9.0))
    before = machine.CoreUse(busy=10.0, everything=100.0, own=0.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [CPU(0, 500), CPU(17, 93)])
    assert machine.used_by_others(before) == pytest.approx(0.5)  # 7 s, of which 2 are its own


def test_without_proc_the_use_of_the_cores_is_unknown(monkeypatch):
    def missing(percpu):
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", missing)
    assert machine.CoreUse.now() is None and machine.used_by_others(None) is None
    assert "without knowing" in this_machine(busy=None).source


def test_a_measurement_ends_with_the_command(monkeypatch):
    started = []

    def interrupted(process, observe):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "_messages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine._in_process(1, lambda subject: None)
    assert started[0].returncode == -signal.SIGKILL


def test_a_cache_is_no_option_of_measurements():
    result = CliRunner().invoke(command, ["--measure", "--cache", "somewhere"])
    assert result.exit_code == 2 and "remove --cache" in result.output


@pytest.mark.parametrize("named", [True, False])
def test_the_command_says_which_plans_use_the_profile(named, tmp_path, monkeypatch):
    targets = tmp_path / "targets.toml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "measure_machine", lambda observe, even_if_busy: this_machine())
    if named:
        monkeypatch.setenv("GRAPHTRAIN_TARGETS", str(targets))
    else:
        monkeypatch.delenv("GRAPHTRAIN_TARGETS", raising=False)
    users = f"with GRAPHTRAIN_TARGETS={targets}" if named else "in this directory"
    assert f"plans for cpu:N {users} use it" in CliRunner().invoke(command, ["--measure"]).output


@pytest.mark.parametrize("status", [0, 3])
def test_the_output_of_a_measuring_process_may_be_long(status, tmp_path, monkeypatch):
    worker, observed = tmp_path / "python", []
    worker.write_text(WORKER)
    worker.chmod(0o755)
    monkeypatch.setenv("STATUS", str(status))
    monkeypatch.setattr(sys, "executable", str(worker))
    if status:
        with pytest.raises(PlanError, match="measures with 2 devices failed: measuring products"):
            machine._in_process(2, observed.append)
    else:
        assert machine._in_process(2, observed.append) == {"long": "0" * 200_000}
    assert observed == ["products", "memory"]
