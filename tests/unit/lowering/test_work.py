"""Work of a compiled CPU program: products, loops, launches, with trip counts."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from lowering.hlo.loop_work import UNMEASURED, LoopWork, fused_work
from lowering.hlo.text import parse
from lowering.hlo.work import Product, ProgramWork, read_work
from lowering.tracing.control_flow import compute_in_turn

PROGRAM = """\
HloModule jit_train, is_scheduled=true

%fused_update (p0: f32[4,8,16], p1: f32[8,16], p2: s32[]) -> f32[4,8,16] {
  %p0 = f32[4,8,16]{2,1,0} parameter(0)
  %p1 = f32[8,16]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %exp = f32[8,16]{1,0} exponential(%p1)
  %row = f32[1,8,16]{2,1,0} bitcast(%exp)
  ROOT %updated = f32[4,8,16]{2,1,0} dynamic-update-slice(%p0, %row, %p2, %zero, %zero)
}

%fused_transpose (p0: f32[4,8,256], p1: s32[]) -> bf16[256,8] {
  %p0 = f32[4,8,256]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8,256]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,256}
  %narrow = bf16[1,8,256]{2,1,0} convert(%slice)
  %flat = bf16[8,256]{1,0} bitcast(%narrow)
  %turned = bf16[256,8]{0,1} transpose(%flat), dimensions={1,0}
  ROOT %copied = bf16[256,8]{1,0} copy(%turned)
}

%fused_heads (p0: bf16[8,4,64]) -> bf16[4,8,64] {
  %p0 = bf16[8,4,64]{2,1,0} parameter(0)
  ROOT %heads = bf16[4,8,64]{2,1,0} transpose(%p0), dimensions={1,0,2}
}

%fused_alone (p0: f32[8,300]) -> f32[300,8] {
  %p0 = f32[8,300]{1,0} parameter(0)
  %turned = f32[300,8]{0,1} transpose(%p0), dimensions={1,0}
  ROOT %copied = f32[300,8]{1,0} copy(%turned)
}

%fused_narrow (p0: bf16[4,8], p1: f32[1,8], p2: s32[]) -> bf16[4,8] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  %wide = f32[4,8]{1,0} convert(%p0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %updated = f32[4,8]{1,0} dynamic-update-slice(%wide, %p1, %p2, %zero)
  ROOT %narrow = bf16[4,8]{1,0} convert(%updated)
}

%fused_dot (p0: bf16[8,256], p1: bf16[256,32]) -> f32[8,32] {
  %p0 = bf16[8,256]{1,0} parameter(0)
  %p1 = bf16[256,32]{1,0} parameter(1)
  ROOT %dot = f32[8,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[4,8,16], f32[8,16])) -> (s32[], f32[4,8,16], f32[8,16]) {
  %state = (s32[], f32[4,8,16]{2,1,0}, f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[4,8,16]{2,1,0} get-tuple-element(%state), index=1
  %x = f32[8,16]{1,0} get-tuple-element(%state), index=2
  %new = f32[4,8,16]{2,1,0} fusion(%stack, %x, %i), kind=kLoop, calls=%fused_update, \
backend_config={"outer_dimension_partitions":["2","2"]}
  ROOT %next = (s32[], f32[4,8,16]{2,1,0}, f32[8,16]{1,0}) tuple(%i, %new, %x)
}

%condition (state: (s32[], f32[4,8,16], f32[8,16])) -> pred[] {
  %state = (s32[], f32[4,8,16]{2,1,0}, f32[8,16]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (a: bf16[8,256], b: bf16[256,32], c: f32[4,8,256]) -> (f32[8,32], bf16[256,8]) {
  %a = bf16[8,256]{1,0} parameter(0)
  %b = bf16[256,32]{1,0} parameter(1)
  %c = f32[4,8,256]{2,1,0} parameter(2)
  %i = s32[] constant(1)
  %start = (s32[], f32[4,8,16]{2,1,0}, f32[8,16]{1,0}) tuple(%i)
  %loop = (s32[], f32[4,8,16]{2,1,0}, f32[8,16]{1,0}) while(%start), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %product = f32[8,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused_dot
  %turned = bf16[256,8]{1,0} fusion(%c, %i), kind=kLoop, calls=%fused_transpose
  ROOT %result = (f32[8,32]{1,0}, bf16[256,8]{1,0}) tuple(%product, %turned)
}
"""


def test_products_are_counted_with_their_sizes():
    assert read_work(PROGRAM).products == {Product(1, 8, 256, 32, "bf16"): 1}


def test_a_loop_counts_as_often_as_it_runs_and_an_update_in_place_with_the_update_alone():
    update = LoopWork(bytes=2 * 8 * 16 * 4 + 4, elements=(("exp", 128),), partitions=4)
    work = read_work(PROGRAM)
    assert work.loops[update] == work.iterations == 4
    assert work.launches == 4 + 2


def test_a_slice_that_is_transposed_counts_with_what_is_read_of_its_array():
    elements = (("to_bfloat16", 2048), ("transposed_aliased", 2048))  # rows of 256
    turned = LoopWork(bytes=2048 * (4 + 2) + 4, elements=elements, partitions=1)
    assert read_work(PROGRAM).loops[turned] == 1


def test_a_record_has_the_whole_work():
    work = read_work(PROGRAM)
    assert ProgramWork.from_record(json.loads(json.dumps(work.to_record()))) == work
    assert work.arrays == 3 + 2


def test_moves_are_told_apart():
    computations = parse(PROGRAM).computations
    heads, alone = (
        dict(fused_work(computations[f"fused_{name}"], 1).elements) for name in ("heads", "alone")
    )
    assert heads == {"permuted": 4 * 8 * 64}
    assert alone == {"transposed_alone": 300 * 8}


def test_an_update_that_is_converted_is_not_in_place():
    narrow = fused_work(parse(PROGRAM).computations["fused_narrow"], 1)
    assert dict(narrow.elements) == {"arithmetic": 4 * 8, "to_bfloat16": 4 * 8}
    assert narrow.bytes == 2 * (4 * 8 * 2) + 8 * 4 + 4


def test_a_conversion_alone_reads_its_operand():
    text = """\
HloModule m

%fused (p0: bf16[64]) -> f32[64] {
  %p0 = bf16[64]{0} parameter(0)
  ROOT %wide = f32[64]{0} convert(%p0)
}

ENTRY %main (p0: bf16[64]) -> f32[64] {
  %p0 = bf16[64]{0} parameter(0)
  ROOT %wide = f32[64]{0} fusion(%p0), kind=kLoop, calls=%fused
}
"""
    assert [*read_work(text).loops] == [LoopWork(64 * (2 + 4), (), 1)]


def test_compiled_loops_that_are_slow_in_bfloat16_have_kinds_of_their_own():
    narrow = jnp.ones((512, 256), jnp.bfloat16)

    def kinds(function, *arguments):
        work = read_work(jax.jit(function).lower(*arguments).compile().as_text())
        return Counter(kind for loop in work.loops for kind, count in loop.elements if count > 2000)

    def summed(x):
        return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))

    assert kinds(summed, narrow)["reduce_bfloat16"]
    assert kinds(summed, narrow.astype(jnp.float32)) == {"reduce": 1}
    assert kinds(lambda: jnp.zeros((4, 512), jnp.bfloat16)) == {"repeat_bfloat16": 1}
    assert not kinds(lambda: jnp.zeros((4, 512)))
    assert kinds(lambda x: jax.lax.reduce_precision(2 * x, 8, 7), jnp.ones(4096))["to_bfloat16"]


def test_a_reduction_in_windows_counts_with_what_it_reads():
    text = """\
HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p0: f32[4,128,192], p1: f32[]) -> f32[1,4,192] {
  %p0 = f32[4,128,192]{2,1,0} parameter(0)
  %p1 = f32[] parameter(1)
  ROOT %sums = f32[1,4,192]{2,1,0} reduce-window(%p0, %p1), window={size=4x32x1}, to_apply=%add
}

ENTRY %main (p0: f32[4,128,192], p1: f32[]) -> f32[1,4,192] {
  %p0 = f32[4,128,192]{2,1,0} parameter(0)
  %p1 = f32[] parameter(1)
  ROOT %fusion = f32[1,4,192]{2,1,0} fusion(%p0, %p1), kind=kLoop, calls=%fused
}
"""
    (loop,) = read_work(text).loops
    assert dict(loop.elements) == {"reduce": 4 * 128 * 192}


def test_a_convolution_counts_as_the_product_that_it_is():
    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", feature_group_count=2)

    images, kernel = (jnp.ones(shape) for shape in ((2, 8, 16, 16), (12, 4, 3, 3)))
    text = jax.jit(convolve).lower(images, kernel).compile().as_text()
    (product,) = read_work(text).products
    assert (product.columns, product.summed, product.rows) == (12, 4 * 9, 2 * 16 * 16)
    assert product.dtype == "f32"


def _in_a_loop_of_8(x, taken):
    def body(i, x):
        product, nothing = (lambda x: jnp.tanh(x @ x)), (lambda x: x)
        return compute_in_turn(i % 4 == 0, product, nothing, x, taken)

    return jax.lax.fori_loop(0, 8, body, x)


def test_a_conditional_counts_as_its_work_in_the_iterations_that_its_scope_states():
    """The branch without work stands first in the text."""
    text = jax.jit(lambda x: _in_a_loop_of_8(x, (2, 8))).lower(jnp.ones((64, 64))).compile()
    work = read_work(text.as_text())
    assert work.products == {Product(1, 64, 64, 64, "f32"): 2}
    assert work.iterations == 8


@pytest.mark.parametrize("is_first", [True, False])
def test_a_conditional_without_a_stated_number_counts_as_its_largest_branch_always(is_first):
    cases = [lambda x: x @ x, lambda x: x + 1]

    def step(x, condition):
        return jax.lax.cond(condition, *(cases if is_first else cases[::-1]), x)

    text = jax.jit(step).lower(jnp.ones((64, 64)), True).compile().as_text()
    assert read_work(text).products == {Product(1, 64, 64, 64, "f32"): 1}


def test_calls_of_lapack_count_as_factorizations_of_their_matrices():
    def step(x):
        return jnp.linalg.qr(x)[0], jnp.linalg.eigh(x)[1], jnp.linalg.cholesky(x)

    text = jax.jit(step).lower(jnp.ones((3, 16, 16))).compile().as_text()
    elements = {kind: count for loop in read_work(text).loops for kind, count in loop.elements}
    assert elements["qr"] == elements["eigh"] == 3 * 16 * 16 * 16
    assert elements[UNMEASURED + "potrf"] == 3 * 16 * 16 * 16


def test_parts_of_an_execution_are_counted_and_kept_by_records():
    text = jax.jit(lambda x: _in_a_loop_of_8(x, (1, 3))).lower(jnp.ones((64, 64))).compile()
    work = read_work(text.as_text())
    assert work.products == {Product(1, 64, 64, 64, "f32"): pytest.approx(8 / 3)}
    assert ProgramWork.from_record(json.loads(json.dumps(work.to_record()))) == work
