"""Profiles of a run: traces of the steps that were asked for, joined with the compiled program."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from places import Place, furnish

SCRIPT = r"""
import os, signal
import graphtrain as gt

class Signal:
    def on_step(self, step, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGUSR2)

SETTINGS = ["program.mesh.tensor=2", "program.mesh.data=1", "run.data.validation=data/validation"]
plain, settings = [*SETTINGS, "run.directory=plain"], [*SETTINGS, "run.profile=7:8"]
gt.train("config.toml", set=plain, target="cpu:2", compile=True)
gt.train("config.toml", set=settings, target="cpu:2", callbacks=[Signal()])
"""
TARGET = ["--target", "cpu:2", "--set", "program.mesh.tensor=2", "--set", "program.mesh.data=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Place:
    """A run of two devices that was asked twice for profiles."""
    path = tmp_path_factory.mktemp("profiles")
    furnish(path, corpus)
    place = Place(path, path / "cache")
    process = place.start_python("-c", SCRIPT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return place


def test_every_collective_and_product_of_the_program_is_measured(place):
    out, _ = place.command("profile", "run", "--json", "--html", "page.html")
    profile = json.loads(out)
    assert (profile["first_step"], profile["last_step"], profile["devices"]) == (7, 8, 2)

    plan = json.loads(place.command("plan", "config.toml", "--json", *TARGET)[0])
    planned, measured = Counter(), Counter()
    for one in plan["collectives"]:
        planned[one["op"], one["source"], one["bytes"]] += one["count"]
    for row in profile["collectives"]:
        one = row["collective"]
        measured[one["op"], one["source"], one["bytes"]] += one["count"]
        assert row["measured"] >= row["fastest"] > 0 and row["predicted"] is None
    assert measured == planned

    parts = {one["part"] for one in profile["kernels"] if one["kind"] == "products"}
    assert {"head", "mlp/gate+up", "mlp/down", "attention/output"} <= parts
    flops = sum(one["flops"] for one in profile["kernels"])
    estimated = sum(one["flops_per_device"] for one in plan["flops_by_part"])
    assert flops == pytest.approx(estimated, rel=0.05)
    assert all(one["part"] != "not in the program" for one in profile["kernels"])
    assert 0 < profile["totals"]["products"]["predicted"] <= profile["predicted_step"]

    page = (place.path / "page.html").read_text()
    assert "graphtrain/models/mlp.py" in page and "measured and predicted time" in page


def test_a_signal_traces_the_next_steps_and_results_stay_the_same(place):
    names = sorted(path.name for path in (place.path / "run/profiles").iterdir())
    assert names == ["5-6", "7-8"]  # as many steps as run.profile has
    (trace,) = (place.path / "run/profiles/5-6/rank-0").glob("plugins/profile/*/*.trace.json.gz")
    check_trace(json.loads(gzip.decompress(trace.read_bytes())))
    assert place.curve("run") == place.curve("plain")
    out, _ = place.command("profile", "run", "--steps", "5:6")
    assert "run: steps 5 to 6 on cpu:2, 2 devices: " in out and "predicted at least" in out


def check_trace(trace: dict) -> None:
    """Check what Perfetto and xprof require of Chrome's trace format, and that all is in it."""
    events = [one for one in trace["traceEvents"] if one]
    spans = [one for one in events if one["ph"] == "X"]
    assert {one["ph"] for one in events} <= {"X", "M"}
    for one in spans:
        assert isinstance(one["name"], str) and one["ts"] >= 0 and one["dur"] >= 0
    named = {one["pid"] for one in events if one["ph"] == "M" and one["name"] == "process_name"}
    assert {one["pid"] for one in spans} <= named
    steps = [one["args"]["step_num"] for one in spans if one["name"] == "train"]
    assert steps == ["5", "6"]
    assert any("hlo_op" in one.get("args", {}) for one in spans)


def test_a_profile_of_other_settings_or_steps_is_refused(place):
    other = ["--set", "program.mesh.tensor=1", "--set", "program.mesh.data=2"]
    _, err = place.command("profile", "run", *other, status=2)
    assert "is of cpu:2 with the mesh" in err and "give those of the profile" in err
    _, err = place.command("profile", "run", "--steps", "1:2", status=2)
    assert "has no profile 1-2; it has 5-6, 7-8" in err
    _, err = place.command("profile", "plain", status=2)
    assert 'set run.profile, for example "100:105", or send SIGUSR2' in err
