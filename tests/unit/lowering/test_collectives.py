"""Texts of programs, cut down to what the reader has to understand in them."""

import json
import re

import pytest

from graphtrain.run.step_collectives import first_collective
from lowering.hlo.collectives import Collective, ProgramFacts, read
from lowering.tracing.gradient_scopes import BESIDE_TICK
from sharding_rules.mesh import MeshShape

MESH = MeshShape({"data": 2, "tensor": 4})
TENSOR = "replica_groups=[2,4]<=[8]"
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def entry(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule step\n{ADD}\nENTRY %main (x: f32[8,64]) -> f32[8,64] {{\n{body}\n}}\n"


def only(text):
    (found,) = read(text, MESH).collectives
    return found


X = "%x = f32[8,64]{1,0} parameter(0), metadata={op_name=\"state[\\'weights\\'][\\'up\\']\"}"


def test_an_asynchronous_pair_counts_once():
    text = entry(
        X,
        f"%start = (f32[8,64]{{1,0}}, f32[32,64]{{1,0}}) all-gather-start(%x), {TENSOR}, "
        "dimensions={0}",
        "ROOT %done = f32[32,64]{1,0} all-gather-done(%start)",
    )
    found = only(text)
    assert (found.op, found.bytes, found.count) == ("all-gather", 32 * 64 * 4, 1)
    assert found.arrays == ("state/weights/up",)


def test_a_wrapped_asynchronous_operation_counts_once():
    wrapped = (
        "%wrapped (p: f32[8,64]) -> f32[2,64] {\n"
        "  %p = f32[8,64]{1,0} parameter(0)\n"
        f"  ROOT %scatter = f32[2,64]{{1,0}} reduce-scatter(%p), {TENSOR}, dimensions={{0}}, "
        "to_apply=%add\n}\n"
    )
    text = entry(
        X,
        "%start = ((f32[8,64]{1,0}), f32[2,64]{1,0}, u32[]) async-start(%x), calls=%wrapped",
        "ROOT %done = f32[2,64]{1,0} async-done(%start)",
    )
    found = only(text.replace("ENTRY", wrapped + "\nENTRY"))
    assert (found.op, found.bytes) == ("reduce-scatter", 8 * 64 * 4)


def test_a_combined_operation_moves_all_its_operands():
    text = entry(
        X,
        "%y = bf16[16]{0} parameter(1)",
        f"ROOT %both = (f32[8,64]{{1,0}}, bf16[16]{{0}}) all-reduce(%x, /*index=1*/%y), {TENSOR}, "
        "to_apply=%add",
    )
    assert only(text).bytes == 8 * 64 * 4 + 16 * 2


def test_a_ragged_exchange_moves_its_first_operand():
    ragged = "ragged-all-to-all(%x, %out, %from, %sizes, %to, %received)"
    text = entry(
        X,
        "%out = f32[99,64]{1,0} parameter(1)",
        *(
            f"%{name} = s32[4]{{0}} parameter({index})"
            for index, name in enumerate(("from", "sizes", "to", "received"), 2)
        ),
        f"ROOT %exchange = f32[99,64]{{1,0}} {ragged}, {TENSOR}",
    )
    assert (only(text).op, only(text).bytes) == ("all-to-all", 8 * 64 * 4)


def test_groups_of_one_device_move_nothing():
    text = entry(X, "ROOT %r = f32[8,64]{1,0} all-reduce(%x), replica_groups=[8,1]<=[8]")
    assert read(text, MESH).collectives == ()


def test_a_conditional_counts_as_the_branch_that_sends_most():
    branches = "".join(
        f"%{name} (p: f32[{size}]) -> f32[{size}] {{\n  %p = f32[{size}]{{0}} parameter(0)\n"
        f"  ROOT %r = f32[{size}]{{0}} all-reduce(%p), {TENSOR}, to_apply=%add\n}}\n\n"
        for name, size in (("small", 8), ("large", 64))
    )
    text = entry(
        "%i = s32[] parameter(0)",
        "%x = f32[8]{0} parameter(1)",
        "%y = f32[64]{0} parameter(2)",
        "ROOT %c = f32[] conditional(%i, %x, %y), branch_computations={%small, %large}",
    )
    assert only(text.replace("ENTRY", branches + "ENTRY")).bytes == 64 * 4


def test_a_conditional_counts_in_the_iterations_that_its_scope_states():
    inside = (
        f"%yes (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n"
        f"  ROOT %r = f32[64]{{0}} all-reduce(%p), {TENSOR}, to_apply=%add\n}}\n\n"
        "%no (p: f32[64]) -> f32[64] {\n  ROOT %p = f32[64]{0} parameter(0)\n}\n\n"
    )
    taken = (
        "conditional(%i, %v, %v), branch_computations={%no, %yes}, "
        'metadata={op_name="while/body/transpose(jvp(taken_3_of_12))/cond"}'
    )
    text = loop("compare(%i, %limit), direction=LT").replace("%cond (s:", f"{inside}%cond (s:")
    text = re.sub(r"all-reduce\(%v\)[^\n]*", taken, text)
    assert only(text).count == 3


def test_sums_of_a_pipeline_outside_of_its_loops_come_after_the_ticks():
    outside = f"%once = f32[64]{{0}} all-reduce(%x), {TENSOR}, to_apply=%add\n  ROOT %loop"
    text = loop("compare(%i, %limit), direction=LT").replace("ROOT %loop", outside)

    def exposed(mesh):
        return {one.count: one.exposed for one in read(text, MeshShape(mesh)).collectives}

    assert exposed({"stage": 2, "data": 4}) == {12: False, 1: True}
    assert exposed({"fsdp": 2, "data": 4}) == {12: False, 1: False}
    assert exposed({"stage": 2, "tensor": 4}) == {12: False, 1: False}


def test_sums_beside_a_tick_of_a_pipeline_are_exposed_unless_products_are_between():
    scope = f'metadata={{op_name="jit(step)/while/body/{BESIDE_TICK}/psum"}}'
    ends = f"{TENSOR}, to_apply=%add, {scope}"
    product = "%y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    start = f"%start = f32[8,64]{{1,0}} all-reduce-start(%x), {ends}"
    done = "ROOT %done = f32[8,64]{1,0} all-reduce-done(%start)"
    waits = loop("compare(%i, %limit), direction=LT").replace(f"{TENSOR}, to_apply=%add", ends)
    for text, overlaps in (
        (entry(X, start, product, done), True),
        (entry(X, product, start, done), False),
        (waits, False),
    ):
        (found,) = read(text, MeshShape({"stage": 2, "data": 4})).collectives
        assert (found.beside_tick, found.exposed) == (overlaps, not overlaps)


def loop(condition, start="0", step="1"):
    """A while loop around an all-reduce, with the counter as the first element of its state."""
    state = "(s32[], f32[64])"
    return entry(
        "%x = f32[64]{0} parameter(0)",
        f"%zero = s32[] constant({start})",
        f"%init = {state} tuple(%zero, %x)",
        f"ROOT %loop = {state} while(%init), condition=%cond, body=%body",
    ).replace(
        "ENTRY",
        f"""%cond (s: {state}) -> pred[] {{
  %s = {state} parameter(0)
  %limit = s32[] constant(12)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %test = pred[] {condition}
}}

%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %by = s32[] constant({step})
  %next = s32[] add(%i, %by)
  %v = f32[64]{{0}} get-tuple-element(%s), index=1
  %r = f32[64]{{0}} all-reduce(%v), {TENSOR}, to_apply=%add
  ROOT %t = {state} tuple(%next, %r)
}}

ENTRY""",
    )


@pytest.mark.parametrize(
    ("direction", "start", "step", "trips"),
    [("LT", "0", "1", 12), ("LE", "0", "1", 13), ("LT", "3", "2", 5), ("LT", "12", "1", 0)],
)
def test_a_loop_counts_from_its_start_by_its_step_to_its_limit(direction, start, step, trips):
    reading = read(loop(f"compare(%i, %limit), direction={direction}", start, step), MESH)
    assert reading.unknown_loops == 0
    assert sum(each.count for each in reading.collectives) == trips
    assert {each.loops for each in reading.collectives} == ({(trips,)} if trips else set())


def test_a_loop_that_does_not_tell_is_reported_and_counts_once():
    reading = read(loop('custom-call(%i), custom_call_target="go_on"'), MESH)
    assert reading.unknown_loops == 1
    assert [each.count for each in reading.collectives] == [1]
    assert reading.kernels == {}


def test_a_sum_of_which_each_device_keeps_a_part_is_a_reduce_scatter():
    fusion = (
        "%all-reduce-scatter.1 (p: f32[8,64]) -> f32[2,64] {\n"
        "  %p = f32[8,64]{1,0} parameter(0)\n"
        f"  %all = f32[8,64]{{1,0}} all-reduce(%p), {TENSOR}, to_apply=%add\n"
        "  %zero = u32[] constant(0)\n"
        "  %me = u32[] partition-id()\n"
        "  ROOT %mine = f32[2,64]{1,0} dynamic-slice(%all, %me, %zero), "
        "dynamic_slice_sizes={2,64}\n}\n\n"
    )
    text = entry(
        X,
        "ROOT %f = f32[2,64]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1, "
        'metadata={op_name="jit(step)/mlp"}',
    )
    found = only(text.replace("ENTRY", fusion + "ENTRY"))
    assert (found.op, found.bytes, found.scope) == ("reduce-scatter", 8 * 64 * 4, "jit(step)/mlp")


def test_a_gather_that_products_hide_counts_once():
    gather = (
        f"%g = f32[32,64]{{1,0}} all-gather(%p), channel_id=7, {TENSOR}, dimensions={{0}}, "
        'frontend_attributes={chain_id="3"}'
    )
    calls = "%started = (f32[8,64], f32[32,64]) custom-call(%g), custom_call_target="
    parts = "".join(
        f"%{name} (p: f32[8,64]) -> f32[32,64] {{\n  %p = f32[8,64]{{1,0}} parameter(0)\n"
        f"  {gather}\n  ROOT {last}\n}}\n\n"
        for name, last in (
            ("begin", f'{calls}"AsyncCollectiveStart"'),
            ("meanwhile", "%t = (f32[8,64]) tuple(%p)"),
            ("end", f'{calls}"AsyncCollectiveDone"'),
        )
    )
    text = entry(
        X,
        "%a = f32[32,64]{1,0} fusion(%x), kind=kCustom, calls=%begin",
        "%b = f32[32,64]{1,0} fusion(%x), kind=kOutput, calls=%meanwhile",
        "ROOT %c = f32[32,64]{1,0} fusion(%x), kind=kCustom, calls=%end",
    )
    reading = read(text.replace("ENTRY", parts + "ENTRY"), MESH)
    assert [each.count for each in reading.collectives] == [1]
    assert reading.kernels == {}


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 16 * 64),
        ("convolution(%x, %w), dim_labels=bf_io->bf", 2 * 8 * 16 * 64),
        (
            'custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", backend_config='
            '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
            2 * 8 * 16 * 64,
        ),
        (
            'custom-call(%x, %w), custom_call_target="tpu_custom_call", backend_config='
            '{"custom_call_config":{"cost_estimate":{"flops":"123456","transcendentals":"0"}}}',
            123456,
        ),
        ("add(%x, %w)", 0),
    ],
)
def test_products_are_counted_in_every_form(line, flops):
    text = entry(X, "%w = f32[64,16]{1,0} parameter(1)", f"ROOT %y = f32[8,16]{{1,0}} {line}")
    assert read(text, MESH).flops == flops


def test_taps_of_a_convolution_that_meet_padding_do_not_count():
    # A TPU's product over heads: four heads of weights slide over one position, padded by three.
    text = entry(
        "%x = bf16[2,128,64,1]{2,1,0,3} parameter(0)",
        "%w = bf16[64,4,16,1]{2,1,0,3} parameter(1)",
        "ROOT %y = f32[2,128,4,16]{3,2,1,0} convolution(%x, %w), "
        "window={size=1x4 pad=0_0x3_3 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f",
    )
    assert read(text, MESH).flops == 2 * (2 * 128) * 64 * (4 * 16)


@pytest.mark.parametrize(("target", "products"), [("Softmax", 2), ("SoftmaxBackward", 5)])
def test_attention_of_cudnn_is_counted_from_its_scores(target, products):
    scores = '"intermediate_tensor_shape":{"dimensions":["2","4","128","256"]}'
    text = entry(
        "%q = bf16[2,128,4,64]{3,2,1,0} parameter(0)",
        "ROOT %y = bf16[2,128,4,64]{3,2,1,0} custom-call(%q), "
        f'custom_call_target="__cudnn$fmha{target}", '
        f'backend_config={{"cudnn_fmha_backend_config":{{{scores}}}}}',
    )
    reading = read(text, MESH)
    assert reading.flops == 2 * products * 2 * 4 * 128 * 256 * 64
    assert reading.kernels == {f"__cudnn$fmha{target}": 1}


def test_operations_that_differ_in_place_alone_are_one():
    text = entry(
        X,
        *(
            f"%r{i} = f32[8,64]{{1,0}} all-reduce(%x), channel_id={i}, {TENSOR}, to_apply=%add, "
            'metadata={op_name="jit(step)/loss"}'
            for i in range(3)
        ),
        "ROOT %y = f32[8,64]{1,0} add(%r0, %r1)",
    )
    found = only(text)
    assert found.count == 3
    assert found.wire_bytes_per_step == 3 * 2 * 3 / 4 * (8 * 64 * 4)


def test_a_reading_survives_its_record():
    full = Collective(
        "all-gather",
        ("data",),
        2,
        8,
        64,
        "bf16",
        "a.py:3",
        "jit(step)",
        (2, 4),
        ("x",),
        "all-gather",
    )
    bare = Collective("all-reduce", ("data", "tensor"), 8, 1, 4)
    reading = ProgramFacts((full, bare), 12.0, 1, {"kernel": 2})
    record = json.loads(json.dumps(reading.to_record()))
    assert ProgramFacts.from_record(record) == reading
    assert "source" not in record["collectives"][1]


def test_arrays_that_are_permuted_together_all_count():
    text = """HloModule m, entry_computation_layout={(f32[8]{0}, bf16[8]{0})->f32[8]{0}}

ENTRY %main (a: f32[8], b: bf16[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = bf16[8]{0} parameter(1)
  %p = (f32[8]{0}, bf16[8]{0}) collective-permute(%a, %b), channel_id=1, \
source_target_pairs={{0,1},{1,0}}
  ROOT %g = f32[8]{0} get-tuple-element(%p), index=0
}
"""
    (one,) = read(text, MeshShape({"context": 2})).collectives
    assert one.bytes == 8 * 4 + 8 * 2


def test_the_first_collective_of_each_group_is_that_of_the_schedule():
    lines = (
        X,
        f"%tensor = f32[8,64]{{1,0}} all-reduce(%x), {TENSOR}, to_apply=%add",
        "%data = f32[8,64]{1,0} all-reduce(%tensor), replica_groups={{0,4},{1,5},{2,6},{3,7}}, "
        "to_apply=%add",
        f"%again = f32[32,64]{{1,0}} all-gather(%data), {TENSOR}, dimensions={{0}}",
        "ROOT %c = f32[8,64]{1,0} copy(%data)",
    )
    text = entry(*lines)
    assert read(text, MESH).first_collectives == ()
    scheduled = text.replace("HloModule step", "HloModule step, is_scheduled=true", 1)
    first = read(scheduled, MESH).first_collectives
    assert [(each.op, each.axes) for each in first] == [
        ("all-reduce", ("tensor",)), ("all-reduce", ("data",)),
    ]  # fmt: skip
    record = read(scheduled, MESH).to_record() | {"mesh": dict(MESH.axes)}
    assert first_collective(record, processes=2) == "all-reduce over data"
    assert first_collective(record, processes=4).startswith("all-reduce over tensor")
    assert first_collective(record | {"first_collectives": []}, processes=2) == ""
