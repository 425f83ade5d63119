"""Time of a step: what machines reach, what is read between products, what overlaps."""

from dataclasses import replace

import pytest

from graphtrain.cost_model.elementwise import elementwise_bytes
from graphtrain.cost_model.time import bandwidth_of, overlap_of, step_time
from graphtrain.planning.assess import estimate
from lowering.machine.target import AT_PEAK, Achieved, Target
from sharding_rules.mesh import MeshShape


@pytest.mark.parametrize("schedule", ["circular", "gpipe", "1f1b"])
def test_activations_of_a_pipeline_are_read_once_for_any_number_of_microbatches(vary, schedule):
    def read(microbatches):
        batch = f"program.batch={{global_batch_size=64, seq_len=512, microbatches={microbatches}}}"
        pipeline = f'program.pipeline={{schedule="{schedule}"}}'
        return elementwise_bytes(vary(["program.mesh={stage=4}", batch, pipeline]), flash=True)

    assert read(4) == read(64) > 0


def test_scores_are_read_where_attention_is_no_kernel(vary):
    program = vary(["program.model.remat=none"])
    model, batch = program.model, program.batch
    scores = batch.global_batch_size / program.mesh.devices * model.heads * batch.seq_len**2
    more = elementwise_bytes(program, flash=False) - elementwise_bytes(program, flash=True)
    assert more == pytest.approx(
        3 * 12 * model.layers * scores
    )  # float32, three times, three passes


def test_products_and_attention_take_the_inverse_of_what_they_reach(vary):
    program = vary(["program.target=h100:8"])
    memory = estimate(program).memory

    def compute(**reached):
        return step_time(
            program, memory, (), achieved=replace(AT_PEAK, **reached), flash=True
        ).compute

    products, both = compute(products=0.5) - compute(), compute(products=0.5, attention=0.5)
    assert products > 0 and both == pytest.approx(2 * compute())
    assert both - compute(products=0.5) == pytest.approx(compute(attention=0.5) - compute())


def test_a_step_takes_the_sum_of_its_parts(vary):
    time = estimate(vary(["program.target=h100:8", "program.mesh={fsdp=2, tensor=4}"])).time
    sent = sum(time.communication.values())
    assert time.total == pytest.approx(time.compute + time.memory + sent - time.overlapped)
    assert 0 < time.overlapped < sent  # tensor parallelism waits on GPUs


def test_tensor_parallelism_overlaps_as_far_as_published_steps_show():
    achieved = Achieved(0.5, 0.5, tensor_overlap=0.6)
    assert overlap_of(["data", "context"], achieved) == 1.0
    assert overlap_of(["tensor"], achieved) == overlap_of(["fsdp", "tensor"], achieved) == 0.6
    assert overlap_of(["stage"], achieved) == overlap_of(["tensor", "stage"], achieved) == 0.0


def test_a_machine_without_published_steps_has_what_another_reaches():
    assert Target.parse("h200:8").achieved == Target.parse("h100:8").achieved
    assert Target.parse("h200:8").achieved.machine == "h100"
    assert Target.parse("a100:8").achieved.machine == "a100"
    assert Target.parse("a100-40:8").achieved == Target.parse("a100:8").achieved
    assert Target.parse("cpu:8").achieved is None
    assert Target.parse("neuron-sim:2").achieved is None  # runs on this machine's CPU


def test_a_group_on_a_torus_has_the_links_of_the_dimensions_it_spans():
    target = Target.parse("v5p:4x4x8")

    def speed(**sizes):
        return bandwidth_of(tuple(sizes), MeshShape(sizes), target)

    assert speed(tensor=8) == 100e9
    assert speed(fsdp=16) == 200e9
    assert speed(fsdp=128) == 300e9
