"""Profiles: which steps are traced, operations of a compiled program, and damaged files."""

import json

import pytest

from graphtrain.config.schema import Data, Run
from graphtrain.errors import TrainingError
from graphtrain.run.profiles.capture import Profiler
from graphtrain.run.profiles.files import ProfileFacts, profile_names, read_profile, write_facts
from graphtrain.run.profiles.trace import read_trace
from lowering.hlo.operations import program_name, read_operations
from sharding_rules.mesh import MeshShape

FACTS = ProfileFacts(5, 6, 1.5, "cpu:1", {"data": 1}, 0, 100)
HLO = """HloModule jit_train, is_scheduled=true

%fused (p: f32[4,8], q: f32[8,2]) -> f32[4,2] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8,2]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(train)/jvp(mlp)/up/dot_general"}
}

%body (state: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %state = (s32[], f32[4,2]{1,0}) parameter(0)
  %value = f32[4,2]{1,0} get-tuple-element(%state), index=1
  %all-reduce.3 = f32[4,2]{1,0} all-reduce(%value), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(train)/while/body/reduce"}
  ROOT %out = (s32[], f32[4,2]{1,0}) tuple(%value, %all-reduce.3)
}

%condition (state: (s32[], f32[4,2])) -> pred[] {
  %state = (s32[], f32[4,2]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%state, %state), direction=LT
}

ENTRY %main (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  %mul_fusion = f32[4,2]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused, metadata={op_name="jit(train)/mul"}
  %start = (s32[], f32[4,2]{1,0}) tuple(%b, %mul_fusion)
  %while.1 = (s32[], f32[4,2]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %copy.9 = f32[4,2]{1,0} copy(%mul_fusion)
}
"""  # noqa: E501


@pytest.mark.parametrize("steps", ["5", "0:3", "9:8", "1:101", "1:2:3", "a:b", "-1:2"])
def test_steps_that_are_no_range_are_refused(steps):
    with pytest.raises(ValueError, match="the first and the last step, at most 100 steps"):
        Run(directory="run", steps=4, data=Data(train="data/train"), profile=steps)


def test_only_the_steps_that_are_named_or_asked_for_are_due(tmp_path):
    profiler = Profiler(tmp_path, "7:8", "cpu")
    assert [step for step in range(1, 12) if profiler.is_due(step)] == [7]
    profiler.request()
    assert profiler.is_due(3)
    assert not Profiler(tmp_path, None, "cpu").is_due(1)


def test_steps_that_a_run_does_not_reach_are_a_warning(tmp_path):
    with pytest.warns(UserWarning, match='"50:60" begins after the last step, 20'):
        Profiler(tmp_path, "50:60", "cpu", 20)
    Profiler(tmp_path, "20:60", "cpu", 20)


def test_a_target_that_the_profiler_does_not_see_is_a_warning(tmp_path):
    profiler = Profiler(tmp_path, "2:3", "neuron")
    with pytest.warns(UserWarning, match="does not see programs of neuron"):
        profiler.move(2, None, {})
    assert not profiler.is_capturing


def test_operations_are_those_that_a_device_executes_with_what_is_inside_them():
    operations = read_operations(HLO, MeshShape({"data": 2}))
    assert program_name(HLO) == "jit_train"
    assert set(operations) == {"mul_fusion", "all-reduce.3", "less", "copy.9"}
    product = operations["mul_fusion"]
    assert (product.flops, product.count) == (2 * 4 * 2 * 8, 1)
    assert product.scope.endswith("up/dot_general")  # that of its product
    reduced = operations["all-reduce.3"]
    assert reduced.count == 3 and reduced.collective is not None
    assert (reduced.collective.axes, reduced.collective.bytes) == (("data",), 4 * 2 * 4)


def test_profiles_are_read_by_their_steps_in_order(tmp_path):
    assert profile_names(tmp_path) == []
    with pytest.raises(TrainingError, match=r'has no profile; set run\.profile, for example "100'):
        read_profile(tmp_path)
    for name in ("5-6", "12-13"):
        path = tmp_path / f"profiles/{name}/rank-0"
        path.mkdir(parents=True)
        write_facts(path, FACTS, HLO)
    assert profile_names(tmp_path) == ["5-6", "12-13"]
    (process,) = read_profile(tmp_path, "5:6")
    assert process.facts == FACTS and process.program_text() == HLO
    with pytest.raises(TrainingError, match=r"no \*\.xplane\.pb; the profile is incomplete"):
        _ = process.trace


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "profiles/5-6/rank-0"
    path.mkdir(parents=True)
    with pytest.raises(TrainingError, match="no process has completed its profile"):
        read_profile(tmp_path)
    for content in ("{", json.dumps({"first_step": "x"}), "[]"):
        (path / "profile.json").write_text(content)
        with pytest.raises(TrainingError, match=r"profile\.json: cannot be read"):
            read_profile(tmp_path)
    trace = tmp_path / "vm.xplane.pb"
    trace.write_bytes(b"\xff" * 100)
    with pytest.raises(TrainingError, match=r"is no trace of XLA's profiler|has no operation"):
        read_trace(trace, "jit_train")
