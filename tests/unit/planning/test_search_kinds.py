"""Searches of mixtures, adapters and offload, of several batches, and for less memory."""

from dataclasses import replace

import pytest

from graphtrain.config.schema import (
    Adapter,
    Batch,
    Mesh,
    MixtureOfExperts,
    Model,
    PipelineSettings,
    Program,
)
from graphtrain.config.schema import SearchSettings as Limits
from graphtrain.cost_model.weights import shard_weights
from graphtrain.errors import PlanError
from graphtrain.planning import ranking
from graphtrain.planning.candidates import candidates
from graphtrain.planning.costs import Workload
from graphtrain.planning.search import search

MODEL = Model(layers=2, embed=64, heads=4, kv_heads=2, mlp=128, vocab=256)
PROGRAM = Program(target="h100:4", model=MODEL, batch=Batch(global_batch_size=4, seq_len=64))


def mixture(**settings) -> Program:
    moe = MixtureOfExperts(experts=4, experts_per_token=2, **settings)
    return replace(PROGRAM, model=replace(MODEL, moe=moe))


@pytest.mark.parametrize("capacity", [None, 1.25])
def test_the_experts_of_a_mixture_are_split_with_every_other_axis(capacity):
    meshes = {str(one.mesh) for one in candidates(mixture(capacity_factor=capacity))}
    assert {"expert 4", "fsdp 2 x expert 2", "data 2 x expert 2", "expert 2 x tensor 2"} <= meshes
    assert {"stage 2 x expert 2", "data 4", "fsdp 4"} <= meshes


def test_the_best_with_each_number_of_experts_is_compared_with_the_winner():
    found = search(mixture())
    winner = found.ranked[0].choice("expert")
    others = {f"expert {size}" for size in (1, 2, 4)} - {f"expert {winner}"}
    assert others <= set(found.rejected)


def test_a_dropless_mixture_has_the_rows_of_all_tokens_that_its_devices_share():
    def peak(**mesh):
        (one,) = (
            each
            for each in candidates(big)
            if each.mesh.axes | mesh == each.mesh.axes
            and each.program.model.remat == "dots"
            and each.program.batch.microbatches == 1
            and each.choice("zero") == "none"
        )
        return one.memory.activations

    moe = MixtureOfExperts(experts=4, experts_per_token=2)
    big = Program(
        target="h100:4",
        model=Model(layers=2, embed=1024, heads=8, mlp=2048, vocab=1000, moe=moe),
        batch=Batch(global_batch_size=4, seq_len=2048),
    )
    assert peak(expert=4) > 2 * peak(fsdp=4)
    capped = replace(moe, capacity_factor=1.25)
    big = replace(big, model=replace(big.model, moe=capped))
    assert peak(expert=4) == peak(fsdp=4)


def test_an_adapter_stays_that_of_the_configuration():
    adapter = Adapter(rank=4, alpha=8.0, base_dtype="nf4")
    best = search(replace(mixture(), adapter=adapter)).ranked[0]
    assert best.program.adapter == adapter and best.memory.frozen > best.memory.parameters


def batch_columns(one, *, several: bool) -> list[list[str] | None]:
    """Return the column of batches in the tables of one strategy; None where there is none."""
    tables = (
        ranking.table([one], Workload(), several=several),
        ranking.confirmations([replace(one, estimated=one)], several=several),
    )
    columns = [{column.header: [*column.cells] for column in table.columns} for table in tables]
    return [each.get("batch") for each in columns]


def test_larger_batches_are_compared_by_the_time_of_a_token():
    found = search(PROGRAM, settings=Limits(max_global_batch_size=12))
    by_batch = {one.program.batch.global_batch_size: one for one in found.batches}
    assert sorted(by_batch) == [4, 8, 12]
    headings = ranking.batch_range(found, PROGRAM.batch), ranking.reasons_heading(found)
    assert headings[0] == "4 to 12 x 64"
    size = found.ranked[0].choice("batch")
    assert headings[1].endswith(f", all with a global batch of {size}")
    assert batch_columns(found.ranked[0], several=True) == [[size], [size]]
    rates = {size: one.tokens_per_second for size, one in by_batch.items()}
    best = found.ranked[0]
    assert best.tokens_per_second == pytest.approx(max(rates.values()), rel=0.006)
    assert all(
        rates[size] < max(rates.values()) * 0.9999
        for size in rates
        if size < best.program.batch.global_batch_size
    )


def test_one_batch_is_that_of_the_configuration():
    found = search(PROGRAM)
    assert found.batches == ()
    assert ranking.batch_range(found, PROGRAM.batch) == "4 x 64"
    assert ranking.reasons_heading(found) == "why other strategies rank lower"
    assert batch_columns(found.ranked[0], several=False) == [None, None]
    assert {one.program.batch.global_batch_size for one in found.ranked} == {4}


@pytest.mark.parametrize(
    "limits, message",
    [
        (Limits(max_global_batch_size=3), r"= 3 is less than .*global_batch_size = 4"),
        (Limits(device_memory_gb=81.0), r"= 81 is more than a device of h100:4 has, 80 GB"),
    ],
)
def test_impossible_limits_are_errors(limits, message):
    with pytest.raises(PlanError, match=message):
        search(PROGRAM, settings=limits)


def test_phases_have_batches_of_their_own(vary):
    changes = ["run.steps=9", "program.phase=[{until=5, global_batch_size=8}]"]
    phased = vary(changes).run_settings
    with pytest.raises(PlanError, match=r"program\.phase"):
        search(phased, settings=Limits(max_global_batch_size=32))


def test_the_memory_of_a_device_is_a_limit():
    free = search(PROGRAM).ranked[0].memory.peak / 1e9
    whole = {one.memory.capacity for one in search(PROGRAM).ranked}
    assert whole == {72_000_000_000}  # 90 % of 80 GB, the pool of JAX's allocator
    half = search(PROGRAM, settings=Limits(device_memory_gb=free, memory_fraction=0.9))
    assert {one.memory.capacity for one in half.ranked} <= {int(free * 0.9 * 1e9)}
    assert all(one.memory.peak <= free * 0.9e9 for one in half.ranked)
    nothing = search(PROGRAM, settings=Limits(device_memory_gb=1e-6))
    assert nothing.ranked == () and "nothing fits" in nothing.rejected["tensor 1"]


def test_host_memory_is_used_where_nothing_fits_without_it():
    smallest = min(one.memory.peak for one in candidates(PROGRAM))
    limits = Limits(device_memory_gb=0.97 * smallest / 1e9, memory_fraction=1.0)
    found = search(PROGRAM, settings=limits)
    best = found.ranked[0]
    assert best.program.optimizer.offload_to_host and best.memory.fits
    moments = 2 * sum(one.moment_bytes for one in shard_weights(best.program))
    assert best.time.host >= moments / 64e9 > 0  # what the link takes one way
    assert 0 < best.mfu < 1 and best.tokens_per_second
    assert found.rejected["offload"].startswith("tried, because nothing fits without it")
    assert "offload" not in search(PROGRAM).rejected
    on_cpu = replace(PROGRAM, target="cpu:4")
    assert search(on_cpu, settings=Limits(device_memory_gb=1e-6)).ranked == ()


def test_the_strategy_of_the_configuration_does_not_matter():
    def found(program):
        result = search(program)
        numbers = [(str(one.mesh), one.program.settings, one.seconds) for one in result.ranked]
        return result.considered, result.rejected, numbers

    deep = replace(PROGRAM, model=replace(MODEL, layers=4))
    strategy = {
        "pipeline": PipelineSettings(schedule="1f1b", layers_per_stage=(1, 1, 1, 1)),
        "optimizer": replace(deep.optimizer, offload_to_host=True),
        "model": replace(deep.model, remat="full"),
        "batch": replace(deep.batch, microbatches=4),
        "mesh": Mesh(stage=4),
        "rules": ("zero2", "pipeline"),
    }
    own = found(replace(deep, **strategy))
    assert own == found(deep)
    meshes, best = [mesh for mesh, _, _ in own[2]], own[2][0][1]
    assert any("stage" in mesh for mesh in meshes) and not best.optimizer.offload_to_host


WITH_AHEAD = replace(MODEL, mtp_loss_weight=0.3)
LONG = Batch(global_batch_size=4, seq_len=8192, cross_document_attention=False)


@pytest.mark.parametrize(
    ("changes", "choice", "reason", "meshes"),
    [
        ({"model": WITH_AHEAD}, "schedule 1f1b", "divides the positions", {"stage 2", "fsdp 4"}),
        (
            {"model": WITH_AHEAD, "batch": LONG},
            "stage with context",
            "segment ids of its own positions",
            {"stage 2", "context 4"},
        ),
    ],
)
def test_strategies_that_multi_token_prediction_refuses_are_excluded_with_the_reason(
    changes, choice, reason, meshes
):
    found = search(replace(PROGRAM, **changes), keep=10_000)
    assert reason in found.rejected[choice]
    assert all(one.program.pipeline.schedule != "1f1b" for one in found.ranked)
    tried = {str(one.mesh) for one in found.ranked}
    assert all(any(mesh in each for each in tried) for mesh in meshes)
    both = [mesh for mesh in tried if "stage" in mesh and "context" in mesh]
    assert not both  # short sequences have no context parallelism
