"""Profiles of machines: stored, read by plans of the same machine alone, refused if damaged."""

import copy
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from graphtrain.api.measuring.report import lines
from graphtrain.cost_model import profiled_time
from graphtrain.cost_model.compute import flops_by_part
from graphtrain.cost_model.machine_profile import (
    Measured,
    MeasuredCollective,
    MeasuredFunction,
    MeasuredProduct,
    MeasuredStream,
    check_writable,
    profile_of_this_machine,
    read_profiles,
    store_profile,
    this_machine,
)
from graphtrain.cost_model.measured_time import (
    MissingKind,
    collective_seconds,
    loop_seconds,
    measured_time,
    product_seconds,
)
from graphtrain.cost_model.profiled_time import with_profile
from graphtrain.errors import PlanError
from graphtrain.planning.assess import estimate
from graphtrain.planning.ranking import speeds_note
from graphtrain.planning.search import search
from graphtrain.planning.tables import printed_text
from graphtrain.planning.text import time_table
from lowering.hlo.collectives import Collective
from lowering.hlo.loop_work import LoopWork
from lowering.hlo.work import Product, ProgramWork


def product(seconds, *sizes):
    return MeasuredProduct(seconds, 0.0, "bf16", *sizes)


def made_up(**changes):
    """Return a profile of this machine with round numbers."""
    measured = {
        "measured_at": "2026-01-02T03:04:05+00:00",
        "products": (product(1e-3, 1, 512, 512, 512), product(8e-3, 1, 1024, 1024, 1024)),
        "memory": (
            MeasuredStream(1e-7, 0.0, "copy", 10**4),
            MeasuredStream(1e-5, 0.0, "copy", 10**5),
            MeasuredStream(1e-3, 0.0, "copy", 10**7),
        ),
        "functions": (
            MeasuredFunction(1e-11, 0.0, "arithmetic", 1000),
            MeasuredFunction(1e-9, 0.0, "exp", 1000),
        ),
        "overheads": dict.fromkeys(("launch", "iteration", "step", "array"), Measured(1e-6, 0.0)),
        "collectives": (
            MeasuredCollective(1e-5, 0.0, "all-reduce", 2, 1000),
            MeasuredCollective(2e-5, 0.0, "all-reduce", 2, 2000),
        ),
    }
    return replace(this_machine(**measured), cores=2, **changes)


WORK = ProgramWork(
    products={Product(1, 512, 512, 512, "bf16"): 10},
    loops={LoopWork(10**7, (("exp", 1000),), 1): 2},
    launches=12,
    iterations=0,
    arrays=8,
)
SENT = Collective("all-reduce", ("data",), 2, count=3, bytes=1000)


def test_a_stored_profile_is_read_again_and_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "machine-profiles.json"
    other = made_up(processor="another")
    for profile in (other, made_up(), made_up(busy=0.05)):
        store_profile(path, profile)
    assert read_profiles(path) == (other, made_up(busy=0.05))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"processor": "Other 9000"}, "another processor: Other 9000"),
        ({"features": "0"}, "other instructions"),
        ({"cores": 3}, "3 cores, this process has"),
        ({"versions": {"jax": "0.1", "jaxlib": "0.1"}}, "jax 0.1, this is"),
    ],
)
def test_a_profile_of_another_machine_is_not_used_and_says_why(tmp_path, change, reason):
    path = tmp_path / "machine-profiles.json"
    here = this_machine()
    store_profile(path, replace(made_up(), **({"cores": here.cores} | change)))
    profile, why = profile_of_this_machine(path)
    assert profile is None and reason in why


def test_of_several_profiles_the_reason_is_that_of_the_most_similar_one(tmp_path):
    path = tmp_path / "machine-profiles.json"
    mine = replace(made_up(), cores=this_machine().cores)
    store_profile(path, replace(mine, versions={"jax": "0.1", "jaxlib": "0.1"}))
    store_profile(path, replace(mine, processor="Other 9000", features="0"))
    assert "jax 0.1, this is" in profile_of_this_machine(path)[1]


def test_machines_that_store_at_the_same_time_lose_no_profile(tmp_path):
    path = tmp_path / "machine-profiles.json"
    names = [f"machine {number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store_profile(path, made_up(processor=name)), names))
    assert sorted(one.processor for one in read_profiles(path)) == names


def test_a_folder_without_permission_is_refused_before_the_minute(tmp_path, monkeypatch):
    check_writable(tmp_path / "new folder" / "machine-profiles.json")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(PlanError, match=f"no permission to write in {tmp_path}"):
        check_writable(tmp_path / "machine-profiles.json")


def test_a_damaged_file_is_an_error_that_names_the_entry(tmp_path):
    path = tmp_path / "machine-profiles.json"
    store_profile(path, made_up())
    document = json.loads(path.read_text())
    document["profiles"][0]["products"][0]["seconds"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=r"profiles\.0\.products\.0\.seconds"):
        read_profiles(path)
    document["profiles"][0]["products"][0]["seconds"] = 1e-12  # possible, but not what was written
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="does not match its checksum"):
        read_profiles(path)
    path.write_text(json.dumps(document | {"graphtrain_machine_profiles": 1, "profiles": []}))
    with pytest.raises(PlanError, match="version 1"):
        read_profiles(path)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_an_error_that_says_so(number, tmp_path):
    path = tmp_path / "machine-profiles.json"
    store_profile(path, made_up())
    document = json.loads(path.read_text())
    for key in ("seconds", "spread"):
        damaged = copy.deepcopy(document)
        damaged["profiles"][0]["products"][0][key] = number
        path.write_text(json.dumps(damaged))
        with pytest.raises(PlanError, match="finite"):
            read_profiles(path)


def test_a_measured_product_takes_what_was_measured_and_a_similar_one_its_rate():
    profile = made_up()
    assert product_seconds(Product(1, 512, 512, 512, "bf16"), profile) == pytest.approx(1e-3, 1e-6)
    twice = product_seconds(Product(1, 512, 512, 1024, "bf16"), profile)
    assert twice == pytest.approx(2e-3)  # both measured rates are equal
    with pytest.raises(KeyError, match="f64"):
        product_seconds(Product(1, 8, 8, 8, "f64"), profile)


def test_a_loop_takes_as_long_as_its_memory_or_its_functions():
    profile = made_up()
    assert loop_seconds(LoopWork(10**7, (("exp", 1000),), 1), profile) == pytest.approx(1e-3)
    assert loop_seconds(LoopWork(1000, (("exp", 10**6),), 1), profile) == pytest.approx(1e-3)
    in_cache = loop_seconds(LoopWork(round(10**4.5), (), 1), profile)
    assert in_cache == pytest.approx(10**4.5 * (1e-11 + 1e-10) / 2, 1e-3)


@pytest.mark.parametrize("kind", ["permuted", "log"])
def test_a_kind_of_loops_that_the_profile_lacks_is_measured_again(kind, vary, monkeypatch):
    lacking = LoopWork(1000, ((kind, 10),), 1)
    with pytest.raises(MissingKind, match=kind):
        loop_seconds(lacking, made_up())
    monkeypatch.setattr(profiled_time, "current_profile", lambda: (made_up(), ""))
    program, work = vary(["program.target=cpu:2"]), replace(WORK, loops={lacking: 1})
    time = with_profile(estimate(program).time, program, [], {"work": work.to_record()}, lambda: 0)
    assert time.measured is None
    assert f"lacks loops of the kind {kind}" in time.profile_note
    assert "doctor --measure measures it again" in time.profile_note


def test_a_loop_over_arrays_beyond_the_cache_takes_what_the_largest_stream_takes():
    profile = replace(
        made_up(), memory=(*made_up().memory, MeasuredStream(1.0, 0.0, "copy", 10**9))
    )
    assert loop_seconds(LoopWork(10**6, (), 1), profile) == pytest.approx(10**6 * 1e-9)


def test_a_collective_is_linear_between_measured_sizes_and_beyond():
    profile = made_up()
    for size, seconds in ((10, 1e-5), (1500, 1.5e-5), (4000, 4e-5)):
        one = Collective("all-reduce", ("data",), 2, count=1, bytes=size)
        assert collective_seconds(one, profile) == pytest.approx(seconds)


@pytest.mark.parametrize(("devices", "cores_busy"), [(1, 1), (2, 2), (4, 2)])
def test_devices_share_the_cores(devices, cores_busy):
    time = measured_time(WORK, [SENT], made_up(), devices)
    assert time.products.processor == pytest.approx(devices * 10e-3)
    assert time.products.clock == pytest.approx(devices * 10e-3 / 2)  # on all cores in any case
    assert time.loops.processor == pytest.approx(devices * 2e-3)
    assert time.loops.clock == pytest.approx(devices * 2e-3 / cores_busy)
    assert time.communication["data"].processor == pytest.approx(devices * 3e-5)
    parts = time.products, time.loops, time.overheads, time.communication["data"]
    assert time.total.processor == pytest.approx(sum(part.processor for part in parts))


def test_a_plan_uses_the_profile_of_this_machine_and_says_when_it_was_measured(
    vary, tmp_path, monkeypatch
):
    program = vary(["program.target=cpu:2"])
    without = estimate(program).time
    record = {"work": WORK.to_record()}
    monkeypatch.chdir(tmp_path)
    assert (
        "doctor --measure" in with_profile(without, program, [SENT], record, lambda: 0).profile_note
    )
    store_profile(
        tmp_path / "machine-profiles.json", replace(made_up(), cores=this_machine().cores)
    )
    time = with_profile(without, program, [SENT], record, lambda: 0)
    assert time.is_complete and time.measured and not time.profile_note
    assert time.total == pytest.approx(time.measured.total.clock)
    assert time.measured.source.startswith("measured on 2026-01-02")
    processes = vary(["program.target=cpu:2x1"])
    assert (
        "between processes" in with_profile(without, processes, [], record, lambda: 0).profile_note
    )
    accelerator = vary(["program.target=h100:2"])
    assert with_profile(without, accelerator, [], record, lambda: 0) is without


def test_a_step_that_is_not_compiled_is_estimated_at_the_speeds_of_the_profile(vary, monkeypatch):
    """Products at 268 GFLOP/s, 0.1 ns for each byte that is moved, collectives as measured."""
    program = vary(["program.target=cpu:2", "program.mesh={data=2}", "program.model.remat=dots"])
    monkeypatch.setattr(profiled_time, "current_profile", lambda: (None, ""))
    roofline = estimate(program).time
    monkeypatch.setattr(profiled_time, "current_profile", lambda: (made_up(), ""))
    time = with_profile(roofline, program, [SENT], None, lambda: 10**9)
    flops = sum(part.computed for part in flops_by_part(program, flash=False))
    rate = 2 * 512**3 / 1e-3  # FLOP/s of a core, of both products
    assert time.compute == pytest.approx(flops / (2 * rate))
    assert time.memory == pytest.approx(10**9 * 1e-10)
    assert time.communication == {"data": pytest.approx(3 * 1e-5)}
    assert time.measured is None and time.is_complete and not time.profile_note
    assert "speeds measured on 2026-01-02" in time.source
    planned = estimate(program)
    assert planned.time.speeds == time.speeds and planned.mfu
    printed = printed_text(lambda console: console.print(time_table(planned)))
    assert "lower bound" not in printed and "speeds measured on 2026-01-02" in printed
    narrow = vary(["program.target=cpu:2", "program.model.dtype=float32"])
    without = with_profile(roofline, narrow, [SENT], None, lambda: 0)
    assert not without.speeds and without.profile_note == "no profile has measured f32"


def test_a_search_ranks_its_estimates_by_the_speeds_of_the_profile(vary, monkeypatch):
    operations = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
    collectives = [MeasuredCollective(1e-5, 0.0, name, 2, 1000) for name in operations]
    profile = made_up(collectives=tuple(collectives))
    monkeypatch.setattr(profiled_time, "current_profile", lambda: (profile, ""))
    found = search(vary(["program.target=cpu:2", "program.batch.seq_len=64"]).settings)
    assert all(one.time.is_complete and one.time.speeds for one in found.ranked)
    assert "unknown" not in found.ranked[0].figures
    assert speeds_note(found.ranked).endswith("estimates, speeds measured on 2026-01-02 with jax "
                                              f"{profile.versions['jax']}")  # fmt: skip
    monkeypatch.setattr(profiled_time, "current_profile", lambda: (None, "no profile"))
    unmeasured = search(vary(["program.target=cpu:2", "program.batch.seq_len=64"]).settings)
    assert "are ranked: no profile; graphtrain doctor" in speeds_note(unmeasured.ranked)
    assert speeds_note(search(vary([]).settings).ranked) == ""


def test_every_number_is_printed_with_its_spread_and_how_it_was_measured():
    printed = "\n".join(lines(made_up()))
    assert "bf16 1 x 512 x 512 x 512: 268 GFLOP/s, spread 0%" in printed
    assert "matrix products of JAX arrays" in printed and "exp: 1 ns" in printed
    assert "all-reduce over 2, 0.001 MB: 10 us" in printed
