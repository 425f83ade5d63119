import dataclasses
import math

import pytest

from graphtrain.cost_model.compute import flops_by_part
from graphtrain.cost_model.memory import memory
from graphtrain.graphs.plan import plan_program
from graphtrain.models.flops import parameter_count
from graphtrain.planning.assess import estimate
from graphtrain.planning.parameters import count_parameters
from sharding_rules.errors import ShardingError

STAGES = [
    "program.mesh={stage=2, fsdp=2}",
    "program.batch.microbatches=4",
    "program.model.layers=5",
    "program.pipeline={virtual_stages=2, layers_per_stage=[2, 1, 1, 1]}",
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_dense_layers_hold_the_activations_of_all_microbatches_of_a_stage(vary, schedule):
    settings = [
        "program.mesh={stage=2}",
        "program.target=h100:2",
        f'program.pipeline.schedule="{schedule}"',
        "program.model.mlp=128",
        "program.model.remat=dots",
    ]

    def activations(microbatches, dense):
        mixture = "{experts=4, dense_layers=2, dense_mlp=128}" if dense else "{experts=4}"
        batch = f"global_batch_size={4 * microbatches}, microbatches={microbatches}"
        changed = [f"program.model.moe={mixture}", f"program.batch={{seq_len=128, {batch}}}"]
        return memory(vary([*settings, *changed])).activations

    few, many = (activations(count, True) - activations(count, False) for count in (4, 16))
    assert few > 0 and many == 4 * few


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


@pytest.mark.parametrize(("virtual_stages", "passes"), [(1, 1), (2, 0)])
def test_a_stage_of_one_layer_computes_again_what_a_layer_without_stages_does(
    vary, virtual_stages, passes
):
    """And the kernel of attention its scores; a stage of two layers computes both once more."""
    remat = "program.model.remat=full"
    alone = flops_by_part(vary([remat]), flash=True)
    pipeline = ["program.mesh={stage=2, fsdp=2}", "program.batch.microbatches=4", remat]
    pipeline += [
        "program.pipeline.schedule=1f1b",
        f"program.pipeline.virtual_stages={virtual_stages}",
    ]
    for one, staged in zip(alone, flops_by_part(vary(pipeline), flash=True), strict=True):
        again = 0.0 if one.name == "LM head" else passes * one.model / 3
        assert staged.recomputed == pytest.approx(one.recomputed + again)


def test_parts_add_up_to_the_peak(vary):
    memory = estimate(vary([])).memory
    parts = ("parameters", "optimizer", "gradients", "activations", "temporaries")
    assert abs(memory.peak - sum(getattr(memory, name) for name in parts)) <= len(parts)
    assert memory.fits and not dataclasses.replace(memory, compiler_out_of_memory=True).fits


def test_an_estimate_refuses_a_pattern_that_matches_no_array(vary, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[arrays."layers/mpl/*"]\nembed = []\n')
    with pytest.raises(ShardingError, match=r"'layers/mpl/\*': no array matches; did you mean"):
        estimate(vary([f'program.rules=["data", "{own}"]']))


def test_what_has_no_known_speed_is_unknown_and_not_zero(vary):
    on_cpu = estimate(vary(["program.target=cpu:8", "program.mesh={data=2, tensor=4}"]))
    assert on_cpu.time.memory is None and set(on_cpu.time.communication.values()) == {None}
    assert not on_cpu.time.is_complete and on_cpu.time.total == on_cpu.time.compute
    assert on_cpu.mfu is None
    no_peak = estimate(vary(["program.target=v5p:2x2x1", "program.model.dtype=float32"]))
    assert no_peak.time.compute is None and no_peak.time.total is None and no_peak.mfu is None
    assert no_peak.time.memory and no_peak.time.memory > 0


def test_the_parameters_are_counted_without_the_filler_of_stages(vary):
    program = vary(STAGES)
    plan = plan_program(program)
    specs = (one.spec for one in plan.layouts.values() if one.spec.role == "parameter")
    held = sum(math.prod(spec.shape) for spec in specs)
    assert count_parameters(program, plan).trained == parameter_count(program.model) < held
    adapted = vary(["program.adapter={rank=4, alpha=8}", "run.init_from=base"])
    counted = count_parameters(adapted, plan_program(adapted))
    assert counted.frozen == parameter_count(adapted.model) > 100 * counted.trained
    assert "are trained" in str(counted)


def test_ring_attention_has_the_scores_of_one_tile(vary):
    ring = ["program.target=h100:8", "program.mesh={context=8}", 'program.rules=["context"]']
    ring += ["program.batch.global_batch_size=1", "program.model.remat=full"]
    short, long = (
        estimate(vary([*ring, f"program.batch.seq_len={length}"])).memory.temporaries
        for length in (2**15, 2**16)
    )
    assert short < long < 2.2 * short
