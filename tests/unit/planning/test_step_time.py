"""Time of a step: what machines reach, what is read between products, what overlaps."""

from dataclasses import replace

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter
from graphtrain.cost_model.communication_time import bandwidth_of, speed_of
from graphtrain.cost_model.elementwise import elementwise_bytes
from graphtrain.cost_model.exposed_reductions import exposed_reductions
from graphtrain.cost_model.host_transfers import exposed_seconds
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.time import moved_bytes, overlap_of, step_time
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.models.mlp_block_count import mlp_block_count
from graphtrain.planning.assess import estimate
from lowering.hlo.collectives import Collective
from lowering.machine.target import AT_PEAK, Achieved, Target
from sharding_rules.mesh import MeshShape


@pytest.mark.parametrize("schedule", ["circular", "gpipe", "1f1b"])
def test_activations_of_a_pipeline_are_read_once_for_any_number_of_microbatches(vary, schedule):
    def read(microbatches):
        batch = f"program.batch={{global_batch_size=64, seq_len=512, microbatches={microbatches}}}"
        pipeline = f'program.pipeline={{schedule="{schedule}"}}'
        changes = ["program.mesh={stage=4}", batch, pipeline, "program.loss.chunk=none"]
        return elementwise_bytes(vary(changes), flash=True)

    assert read(4) == read(64) > 0


def test_scores_are_read_where_attention_is_no_kernel(vary):
    program = vary(["program.model.remat=none"])
    model, batch = program.model, program.batch
    scores = batch.global_batch_size / program.mesh.devices * model.heads * batch.seq_len**2
    more = elementwise_bytes(program, flash=False) - elementwise_bytes(program, flash=True)
    assert more == pytest.approx(
        3 * 12 * model.layers * scores
    )  # float32, three times, three passes


def test_a_ring_reads_the_scores_of_all_its_blocks(vary):
    ring = ["program.target=h100:8", 'program.rules=["context"]', "program.mesh={context=8}"]
    program = vary(ring)
    model, batch = program.model, program.batch
    scores = batch.global_batch_size * model.heads * batch.seq_len**2 / 8
    more = elementwise_bytes(program, flash=False) - elementwise_bytes(program, flash=True)
    passes = 3 + (model.remat != "none")
    assert more == pytest.approx(12 * passes * model.layers * scores * 17 / 32)  # tiles not hidden


@pytest.mark.parametrize(("microbatches", "chunks"), [(1, 4), (2, 8)])
def test_each_chunk_of_the_loss_reads_and_writes_the_gradient_of_the_head(
    vary, microbatches, chunks
):
    batch = f"program.batch.microbatches={microbatches}"

    def read(*changes):
        return elementwise_bytes(vary([batch, *changes]), flash=True)

    head = 4 * 512 * 4096  # float32
    assert read("program.loss.chunk=128") - read("program.loss.chunk=none") == 2 * chunks * head
    assert read("program.loss.chunk=512") == read("program.loss.chunk=none")


def test_the_update_reads_all_gradients_also_if_the_peak_has_none(vary):
    """The peak of a step with all logits is before the backward pass of the layers."""
    at_logits = vary(["program.model.vocab=100_000", "program.loss.chunk=none"])
    memory = estimate(at_logits).memory
    assert memory.gradients == 0
    moved = moved_bytes(at_logits, memory, flash=True) - elementwise_bytes(at_logits, flash=True)
    parameters, moments = memory.parameters, memory.optimizer
    assert moved == 2 * (parameters + moments + parameters)  # all float32


def test_chunks_with_a_frozen_head_have_no_gradient_to_read(vary):
    in_chunks, whole = (vary([f"program.loss.chunk={one}"]).settings for one in ("128", "none"))
    adapter = Adapter(rank=8, alpha=8)
    reads = [
        elementwise_bytes(resolve(replace(one, adapter=adapter)), flash=True)
        for one in (in_chunks, whole)
    ]
    assert reads[0] == reads[1]


WIDE = [
    "program.target=h100:8",
    "program.model={layers=4, embed=2048, heads=16, mlp=20480, vocab=4096, remat='full'}",
    "program.batch={global_batch_size=64, seq_len=4096}",
    "program.mesh={fsdp=8}",
]


def test_blocks_of_an_mlp_read_and_write_the_sums_of_the_products(vary):
    blocks = mlp_block_count(vary(WIDE))
    assert blocks == 16

    def read(*changes):
        return elementwise_bytes(vary([*WIDE, *changes]), flash=True)

    stream = 8 * 4096 * 2048 * 2  # of a device, bfloat16
    # Of the output in 4 blocks, and of the input's gradient, from gate and from up.
    sums = (4 - 1) + 2 * (16 - 1)
    assert read() - read('program.model.mlp_blocks="none"') == 4 * sums * 2 * stream


def test_a_step_waits_for_the_last_block_of_an_mlp_and_for_the_head(vary):
    program = vary(WIDE)
    sent = {"fsdp": 0.8}
    compute = dict.fromkeys(("MLP", "LM head", "attention scores", "attention projections"), 1e9)

    def exposed(of, **shorter):
        return exposed_reductions(of, compute | shorter, lambda _: sent)["fsdp"]

    # With long products, the last of 16 blocks and, of the head in 8 blocks or in one, the last.
    head = 0.8 / DeviceSizes.of(program).head_blocks
    assert exposed(program) == pytest.approx(0.8 / 16 + head)
    whole = vary([*WIDE, 'program.model.mlp_blocks="none"'])
    assert exposed(whole) == pytest.approx(head)
    # A block of a gated MLP has 2 of 12 products beside its reduction.
    hidden = 0.6 * 2 / 12 * 15 / 16
    assert exposed(program, MLP=0.6) == pytest.approx(0.8 - hidden + head)
    assert exposed_reductions(vary([*WIDE, "program.target=cpu:8"]), compute, lambda _: sent) == {}


def test_what_a_step_waits_for_does_not_overlap(vary):
    of = [*WIDE, "program.target=h100:64", "program.mesh={fsdp=64}"]
    in_blocks, whole = (
        estimate(vary([*of, f'program.model.mlp_blocks="{blocks}"'])).time
        for blocks in ("auto", "none")
    )
    assert in_blocks.communication == whole.communication
    assert 0 < in_blocks.overlapped < whole.overlapped < sum(whole.communication.values())
    assert in_blocks.memory > whole.memory


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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_sums_after_the_last_tick_of_a_pipeline_overlap_with_nothing(vary, schedule):
    batch = "program.batch={global_batch_size=32, seq_len=512, microbatches=4}"
    mesh, target = "program.mesh={data=4, stage=2}", "program.target=h100:8"
    assessed = estimate(vary([target, mesh, batch, f'program.pipeline={{schedule="{schedule}"}}']))
    after = [one for one in assessed.collectives if one.exposed]
    assert {one.axes for one in after} == {("data",), ("data", "stage")}
    assert assessed.time.communication["data"] > 0
    assert assessed.time.overlapped == 0  # nothing is sent over data inside of the ticks
    apart = estimate(vary([target, "program.mesh={data=8}", batch]))
    assert not any(one.exposed for one in apart.collectives)
    assert apart.time.overlapped > 0


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_bubble_is_the_published_share_of_what_a_stage_does_in_its_ticks(vary, rounds):
    """Narayanan et al. 2021, section 2.2: (p - 1) / (v m) of the ideal time."""
    batch = "program.batch={global_batch_size=32, seq_len=512, microbatches=4}"
    pipeline = f'program.pipeline={{schedule="1f1b", virtual_stages={rounds}}}'
    mesh = ["program.target=h100:8", "program.mesh={fsdp=2, stage=4}"]
    program = vary([*mesh, batch, pipeline, "program.model.layers=8"])
    time, flash = estimate(program).time, step_uses_flash_kernel(program)
    between = elementwise_bytes(program, flash) / program.target.specification["bandwidth"]
    assert time.bubble == pytest.approx((time.compute + between) * (4 - 1) / (rounds * 4))
    assert 0 < between < time.memory


@pytest.fixture
def interleaved(vary):
    """Return a function of the estimate of 8 layers in 2 stages, with sums of gradients by mark."""

    def at(virtual_stages=4, seq_len=2048, **mesh):
        sizes = {"data": 4, "stage": 2} | mesh
        batch = f"{{global_batch_size=32, seq_len={seq_len}, microbatches=4}}"
        pipeline = f'{{schedule="1f1b", virtual_stages={virtual_stages}}}'
        settings = [f"program.batch={batch}", f"program.pipeline={pipeline}"]
        settings += [f"program.mesh.{name}={size}" for name, size in sizes.items()]
        settings += ["program.target=h100:8", "program.model.layers=8"]
        assessed = estimate(vary(settings))
        sums = [one for one in assessed.collectives if one.axes == ("data",)]
        exposed, beside = (
            sum(one.wire_bytes_per_step for one in sums if getattr(one, mark))
            for mark in ("exposed", "beside_tick")
        )
        return assessed.time, exposed, beside

    return at


def test_interleaved_1f1b_sums_the_gradients_of_one_round_after_its_last_tick(interleaved):
    time, whole, nothing = interleaved(1)
    assert nothing == time.overlapped == 0
    time, exposed, beside = interleaved()
    assert exposed == pytest.approx(whole / 4, rel=1e-3)
    assert beside == pytest.approx(3 / 4 * whole, rel=1e-3)
    assert time.overlapped == pytest.approx(3 / 4 * time.communication["data"], rel=0.1)


def test_sums_that_take_longer_than_their_ticks_are_hidden_by_these_alone(interleaved):
    time, *_ = interleaved(seq_len=2)
    assert 0 < time.overlapped < 0.1 * time.communication["data"]


def test_sums_do_not_overlap_with_ticks_whose_layers_have_collectives(interleaved):
    _, exposed, beside = interleaved(data=2, fsdp=2)
    assert exposed > 0 == beside


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


def test_groups_across_slices_share_the_data_center_network():
    mesh = MeshShape({"data": 4, "fsdp": 32})  # data 2 is across slices, data 2 x fsdp 32 inside
    dcn = 12.5e9 / 2  # of one v5p

    def speed(*axes, target="2xv5p:4x4x4"):
        return bandwidth_of(axes, mesh, Target.parse(target))

    assert speed("fsdp") == 300e9  # inside of a slice, over all of its dimensions
    assert speed("data") == 2 * dcn  # the two members of a slice send a half each
    assert speed("data", "fsdp") == 300e9  # 64 x the DCN of a chip is faster than the torus
    assert speed("data", target="2xv4:4x4x4") == 0.0  # its DCN is not known


def test_the_slowest_axes_of_a_mesh_run_across_slices():
    mesh = MeshShape({"data": 3, "fsdp": 4, "tensor": 2})
    assert mesh.across(2) == {"data": 1, "fsdp": 2, "tensor": 1}
    assert mesh.across(6) == {"data": 3, "fsdp": 2, "tensor": 1}
    assert mesh.across(1) == {"data": 1, "fsdp": 1, "tensor": 1}


def test_slices_cost_what_the_gradients_need_between_them(vary):
    mesh = "program.mesh={data=2, fsdp=8}"
    one, two = (
        estimate(vary([f"program.target={target}", mesh])) for target in ("v5e:4x4", "2xv5e:2x4")
    )
    assert two.time.compute == one.time.compute
    sent = sum(each.wire_bytes_per_step for each in two.collectives if each.axes == ("data",))
    ici, dcn = 50e9, 6.25e9 / 2  # a link of the torus; 25 Gbit/s
    slower = two.time.communication["data"] - one.time.communication["data"]
    assert slower == pytest.approx(sent / dcn - sent / ici) and sent > 0


def test_the_steps_of_a_compiled_sum_across_slices_use_their_own_networks():
    mesh, target = MeshShape({"data": 4, "fsdp": 32}), Target.parse("2xv5p:4x4x4")
    inside = Collective("reduce-scatter", ("data",), 2, 1, 2**20)
    across = Collective("all-reduce", ("data",), 2, 1, 2**19, network="dcn")
    assert speed_of(inside, mesh, target) == 100e9 and speed_of(across, mesh, target) == 6.25e9
    unknown = Target.parse("2xv4:4x4x4")
    assert speed_of(across, mesh, unknown) == 0.0 and speed_of(inside, mesh, unknown) == 50e9


def _speed(op, target, **sizes):
    mesh = MeshShape(sizes)
    return speed_of(
        Collective(op, tuple(sizes), mesh.devices, 1, 2**20), mesh, Target.parse(target)
    )


def test_an_all_to_all_sends_most_bytes_by_the_network_of_one_device():
    sent, network = 63 / 64, 50e9  # of an H100; 400 Gbit/s
    seconds = sent / _speed("all-to-all", "h100:64", expert=64)
    assert seconds == pytest.approx(56 / 64 / network)  # to 56 GPUs of other hosts
    assert _speed("all-gather", "h100:64", fsdp=64) == 8 * network
    assert _speed("all-to-all", "h100:8", expert=8) == 450e9
    of_stage = speed_of(
        Collective("all-to-all", ("expert",), 8, 1, 2**20),
        MeshShape({"expert": 8, "tensor": 8}),
        Target.parse("h100:64"),
    )
    assert of_stage == network  # each is on a host of its own


def test_a_ring_across_hosts_is_as_fast_as_one_network_port():
    assert _speed("collective-permute", "h100:64", context=64) == 50e9
    assert _speed("collective-permute", "h100:8", context=8) == 450e9


def test_an_all_to_all_on_a_torus_passes_a_quarter_of_its_longest_ring():
    link = 50e9  # of a dimension of v5e, both ways round
    for topology, chips, longest in [("2x2", 4, 2), ("4x4", 16, 4), ("16x16", 256, 16)]:
        seconds = (chips - 1) / chips / _speed("all-to-all", f"v5e:{topology}", expert=chips)
        assert seconds == pytest.approx(longest / 4 / link)


def test_an_all_to_all_across_slices_is_limited_by_the_network_of_one_device():
    seconds = 63 / 64 / _speed("all-to-all", "2xv5p:2x4x4", expert=64)
    assert seconds == pytest.approx(32 / 64 / (12.5e9 / 2))


def test_transfers_of_moments_to_the_host_are_not_hidden(vary):
    offload = ["program.optimizer.offload_to_host=true"]
    time = estimate(vary(["program.target=a100:4", *offload])).time
    plain = estimate(vary(["program.target=a100:4"]))
    assert plain.time.host == 0
    # Once in each direction, at half of the 64 GB/s of both directions.
    assert time.host == pytest.approx(2 * plain.memory.optimizer / 32e9)
    sent = sum(time.communication.values()) - time.overlapped
    assert time.total == pytest.approx(time.compute + time.memory + sent + time.host)
    with_offload = estimate(vary(["program.target=a100:4", *offload])).memory
    assert with_offload.host == plain.memory.optimizer and not with_offload.optimizer
    on_tpu = estimate(vary(offload))
    assert on_tpu.time.host is None and on_tpu.mfu is None and not on_tpu.time.is_complete


def test_transfers_of_activations_take_time_where_they_take_longer_than_compute(vary):
    program = vary(["program.target=a100:4", "program.model.remat=offload"])
    layers, tokens = 4, 4 * 512
    heads, hidden, attended, stream = 3 * 512, 2 * 1024, 512, 512  # bfloat16 numbers of a token
    log_sum_exp = 8 * 4  # bytes of a token: float32 of each head
    sent = 2 * layers * tokens * (2 * (heads + hidden + attended + stream) + log_sum_exp)
    assert exposed_seconds(program, 0.0) == pytest.approx(sent / 32e9)
    assert exposed_seconds(program, sent / 32e9 / 4) == pytest.approx(sent / 32e9 * 3 / 4)
    assert exposed_seconds(program, 1.0) == 0
