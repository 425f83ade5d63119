from dataclasses import replace

import pytest
from in_process import graphtrain

from graphtrain.cost_model.measured_time import MeasuredTime, PartSeconds
from graphtrain.planning.assess import estimate
from graphtrain.planning.diff import differences

CONFIG = """
[program]
target = "h100:2"
model = { layers = 2, embed = 64, heads = 4, mlp = 128, vocab = 256 }
batch = { global_batch_size = 4, seq_len = 64 }

[run]
directory = "run"
steps = 1
data = { train = "data" }
"""


def test_equal_programs_have_no_difference(vary):
    assert differences(estimate(vary([])), estimate(vary([]))) == []


def test_only_what_differs_is_told(vary):
    changes = differences(estimate(vary([])), estimate(vary(["program.model.remat=full"])))
    assert {one.kind for one in changes} == {"memory", "communication", "time"}
    by_name = {one.what: one for one in changes}
    assert by_name["activations"].ratio < 1
    assert by_name["activations"].unit == "bytes"
    assert "parameters" not in by_name


def test_a_time_by_a_profile_differs_in_its_source_and_in_starting_operations(vary):
    before = estimate(vary([]))
    by_profile = MeasuredTime("measured on 2026-01-02", *3 * [PartSeconds(2.0, 1.0)])
    after = replace(before, time=replace(before.time, starting=1.0, measured=by_profile))
    changes = {one.what: (one.before, one.after) for one in differences(before, after)}
    assert changes["source"] == ("estimate", "measured on 2026-01-02")
    assert changes["starting operations"] == (0.0, 1.0)


def test_a_new_mesh_axis_appears_and_an_old_one_goes(vary):
    mesh = ["program.mesh={tensor=4}"]
    changes = {one.what: one for one in differences(estimate(vary([])), estimate(vary(mesh)))}
    assert (changes["mesh"].before, changes["mesh"].after) == ("fsdp 4", "tensor 4")
    up = changes["state/parameters/layers/mlp/up"]
    assert up.before == "float32 4x512(fsdp)x1024" and up.after == "float32 4x512x1024(tensor)"
    assert changes["all-gather over fsdp"].after is None
    assert changes["reduce-scatter over tensor"].before is None


def test_moments_that_follow_their_parameters_are_left_out(vary):
    changed = estimate(vary(["program.mesh={tensor=4}"]))
    changes = {one.what for one in differences(estimate(vary([])), changed)}
    assert not any(name.startswith("state/optimizer/") for name in changes)


def test_moments_that_change_alone_are_told(vary):
    changed = estimate(vary(["program.optimizer.moment_dtype=bfloat16"]))
    changes = {one.what: one for one in differences(estimate(vary([])), changed)}
    assert changes["state/optimizer/adam/mu/head"].after == "bfloat16 512(fsdp)x4096"
    assert "state/optimizer/adam/nu/head" not in changes


@pytest.mark.parametrize(
    "change", ["program.mesh.tensor=3", "program.model.remat=some", "program.nothing=1", "remat"]
)
def test_a_wrong_change_is_named_with_its_option(change, tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    command = "plan", "diff", str(tmp_path / "config.toml"), "--no-compile"
    outcome = graphtrain(*command, "--with", change)
    assert outcome.status != 0 and f"--with {change}: " in outcome.err
    assert "--set" not in outcome.err
    outcome = graphtrain(*command, "--set", change, "--with", "run.steps=2")
    assert f"--set {change}: " in outcome.err and "--with" not in outcome.err
