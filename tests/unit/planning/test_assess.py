import dataclasses

from graphtrain.graphs.plan import plan_program
from graphtrain.planning.assess import estimate

STAGES = [
    "program.mesh={stage=2, fsdp=2}",
    "program.batch.microbatches=4",
    "program.model.layers=5",
    "program.pipeline={virtual_stages=2, layers_per_stage=[2, 1, 1, 1]}",
]


def test_stages_of_unequal_size_hold_their_filler(vary):
    program = vary(STAGES)
    memory, plan = estimate(program).memory, plan_program(program)
    assert memory.parameters == plan.bytes_per_device("parameter")
    full = estimate(
        vary([*STAGES[:2], "program.model.layers=8", "program.pipeline.virtual_stages=2"])
    )
    assert memory.parameters == full.memory.parameters


def test_filler_is_no_useful_work(vary):
    uneven, even = (
        estimate(
            vary(
                [*STAGES[:2], f"program.model.layers={layers}", "program.pipeline.virtual_stages=2"]
            )
        )
        for layers in (5, 8)
    )
    assert uneven.time.compute == even.time.compute
    assert uneven.mfu < even.mfu


def test_parts_add_up_to_the_peak(vary):
    memory = estimate(vary([])).memory
    parts = ("parameters", "optimizer", "gradients", "activations", "temporaries")
    assert abs(memory.peak - sum(getattr(memory, name) for name in parts)) <= len(parts)
    assert memory.fits and not dataclasses.replace(memory, compiler_out_of_memory=True).fits
