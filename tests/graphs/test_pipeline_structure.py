"""What compilers make of a pipeline for machines that are not here."""

import dataclasses
import functools
import importlib.util
import re
from collections import Counter

import pytest
from programs import LLAMA, lower, program

from graphtrain.config.schema import Batch, Mesh, PipelineSettings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler, libtpu, is not installed"
)

MODEL = dataclasses.replace(LLAMA, layers=8, embed=256, mlp=512, dtype="bfloat16", remat="dots")
SCHEDULES = {
    "gpipe": PipelineSettings(schedule="gpipe"),
    "circular": PipelineSettings(virtual_stages=2),
    "1f1b": PipelineSettings(schedule="1f1b"),
}
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


@functools.cache
def compiled(schedule, microbatches):
    of = program(
        target="v5e:2x4",
        mesh=Mesh(data=2, stage=4),
        model=MODEL,
        batch=Batch(global_batch_size=4 * microbatches, seq_len=512, microbatches=microbatches),
        pipeline=SCHEDULES[schedule],
    )
    lowered = lower(of, "gradients")
    return lowered.handle.compile(compiler_options=lowered.options)


def collectives(text):
    """Collectives inside loops and outside, by name; each once, though its parts are scheduled
    between other work."""
    bodies, name = {}, None
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.rstrip().endswith("{"):
            name = re.match(r"(?:ENTRY )?%?([\w.-]+)", line)[1]
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    called = {
        name: set(re.findall(r"%([\w.-]+)", "\n".join(lines))) & set(bodies)
        for name, lines in bodies.items()
    }
    inside = set()
    waiting = set(re.findall(r"body=%?([\w.-]+)", text))
    while waiting:
        inside |= waiting
        waiting = set().union(*(called[name] for name in waiting)) - inside
    found = {True: set(), False: set()}
    for name, lines in bodies.items():
        for line in lines:
            if operation := COLLECTIVE.search(line):
                where = re.search(r'op_name="([^"]*)".*?stack_frame_id=(\d+)', line)
                found[name in inside].add((operation[1], *where.groups()))
    return tuple(Counter(operation for operation, *_ in found[loop]) for loop in (True, False))


@pytest.mark.parametrize(
    ("schedule", "in_loops"),
    [
        ("gpipe", {"collective-permute": 4}),  # x and the queue, forward and backward
        ("circular", {"collective-permute": 4}),
        # The queue in three loops, x in two of them, and its gradient in two. Beside them, the last
        # stage's x to all and its gradient back, for the head.
        ("1f1b", {"collective-permute": 7, "all-to-all": 1, "all-gather": 1}),
    ],
)
def test_loops_pass_microbatches_on_and_neither_reduce_gradients_nor_gather_weights(
    schedule, in_loops
):
    inside, outside = collectives(compiled(schedule, 8).as_text())
    assert inside == in_loops
    assert outside["all-reduce"] and not outside["all-gather"]


def test_one_forward_one_backward_takes_less_memory_for_many_microbatches():
    peak = {
        (schedule, count): compiled(schedule, count).memory_analysis().peak_memory_in_bytes
        for schedule in ("gpipe", "1f1b")
        for count in (8, 64)
    }
    grows = {name: peak[name, 64] - peak[name, 8] for name in ("gpipe", "1f1b")}
    assert peak["1f1b", 64] < 0.75 * peak["gpipe", 64]
    assert grows["1f1b"] < grows["gpipe"] / 4  # inputs of embedding alone, split over stages


def test_no_array_of_the_logits_shape_enters_a_loop():
    sizes = Batch(global_batch_size=8, seq_len=512, microbatches=2)
    of = program(target="v5e:2x2", mesh=Mesh(data=2, stage=2), model=MODEL, batch=sizes)
    text = lower(of, "gradients").text
    loops = re.findall(r"stablehlo\.while\(.*", text)
    assert loops and not [loop for loop in loops if f"2x512x{MODEL.vocab}x" in loop]
