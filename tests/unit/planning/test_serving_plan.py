"""The plan of serving, without a compiler: memory, what fits, speeds and findings."""

import dataclasses
import json

import pytest

from graphtrain.cache import Cache
from graphtrain.config.schema.serve import STOP_TOKENS
from graphtrain.config.serving_program import serving_program
from graphtrain.cost_model.serving_memory import temporaries
from graphtrain.models.flops import forward_flops_by_part
from graphtrain.planning.serving import ServingAnswer, answer_serving
from graphtrain.planning.serving_json import serving_as_json
from graphtrain.planning.serving_limits import (
    confirmed_slots,
    longest_context,
    memory_at,
    most_slots,
)
from graphtrain.planning.serving_programs import served_sizes
from lowering.artifact import Artifact
from sharding_rules.errors import ShardingError

H100 = ["program.target=h100:1", "program.mesh={}", "program.model.kv_heads=2"]


@pytest.fixture
def planned(vary, tmp_path):
    """The plan of serving, estimated, with settings changed."""

    def planned(change, purpose="serve") -> ServingAnswer:
        return answer_serving(vary(change), purpose, Cache(tmp_path / "cache"), compile=False)

    return planned


def test_weights_cache_and_sampling_are_counted_in_the_dtype_of_serving(planned):
    answer = planned(H100)
    memory, model = answer.assessment.memory, answer.assessment.model
    layer = 2 * 512 * 512 + 2 * 512 * 2 * 64 + 3 * 512 * 1024
    matrices, vectors = 4 * layer + 2 * 4096 * 512, 9 * 512
    assert memory.weights == 2 * matrices + 4 * vectors
    assert model.cached_positions == 1024  # 512 and one padded chunk of 32, in blocks of 512
    assert memory.kv_cache == 8 * 1024 * 4 * 2 * 2 * 64 * 2
    scalars, by_token = 12 + STOP_TOKENS, 3 * 4096
    assert memory.sampling == 8 * 4 * (scalars + by_token)
    assert planned([*H100, "program.serve.dtype=float32"]).assessment.memory.kv_cache == (
        2 * memory.kv_cache
    )


def test_int8_is_one_byte_and_a_scale_for_each_output_and_embeddings_stay_bfloat16(planned):
    int8 = "program.serve.weights_dtype=int8"
    memory = planned([*H100, int8]).assessment.memory
    layer = 2 * 512 * 512 + 2 * 512 * 2 * 64 + 3 * 512 * 1024
    outputs = 2 * 512 + 2 * 2 * 64 + 2 * 1024 + 512
    head, embedding, vectors = 4096 * 512, 4096 * 512, 9 * 512
    assert (
        memory.weights == 4 * layer + head + 4 * (4 * outputs + 4096) + 2 * embedding + 4 * vectors
    )
    with pytest.raises(ShardingError, match='weights_dtype = "int8" is not supported for trn2:1'):
        planned(["program.target=trn2:1", "program.mesh={}", int8])


def test_adapters_are_counted_with_their_bytes_their_products_and_their_sums(planned):
    room = "program.serve.total_adapter_rank=16"
    base, adapted = planned(H100).assessment, planned([*H100, room]).assessment
    sides = 2 * (512 + 512) + 2 * (512 + 128) + 3 * (512 + 1024)  # in and out, of each matrix
    assert adapted.memory.weights - base.memory.weights == 2 * 4 * 16 * sides
    assert adapted.model.adapter_bytes == 2 * 4 * 16 * sides and base.model.adapter_bytes == 0
    intervals = 8 * 2 * 4
    assert adapted.memory.sampling - base.memory.sampling == intervals
    assert adapted.memory.loading - base.memory.loading == (2 + 4) * 4 * 16 * sides + intervals
    peak = adapted.model.program.target.peak_flops("bfloat16")
    more = adapted.speeds[1].compute - base.speeds[1].compute
    assert more == pytest.approx(8 * 2 * 4 * 16 * sides / peak)
    split = [H100[2], "program.target=h100:2", "program.mesh={tensor=2}"]
    base, adapted = planned(split).assessment, planned([*split, room]).assessment
    ranks = [one for one in adapted.collectives if one.bytes == 8 * 16 * 2]
    assert len(adapted.collectives) - len(base.collectives) == len(ranks) == 2 * 4
    queries = planned([*H100, room, 'program.serve.adapter_target_modules=["*/query"]'])
    assert queries.assessment.model.adapter_bytes == 2 * 4 * 16 * (512 + 512)
    assert planned([*H100, room], "batch").assessment.model.adapter_bytes == 0


def test_tensor_divides_the_cache_by_its_heads_and_data_by_its_slots(planned):
    one = planned(H100).assessment.memory
    for mesh in ("tensor=2", "data=2"):
        two = planned([H100[2], "program.target=h100:2", f"program.mesh={{{mesh}}}"])
        assert two.assessment.memory.kv_cache == one.kv_cache // 2


def test_a_layer_with_a_window_caches_what_it_sees_and_a_chunk(planned):
    windows = ["program.model.sliding_window=100", "program.model.global_attention_every=2"]
    answer = planned([*H100, *windows, "program.serve.context_length=4096"])
    model = answer.assessment.model
    # 100 + 512 - 1 positions, and 4096 + 32, in blocks of 512.
    assert model.positions == [1024, 4608, 1024, 4608]
    assert model.kv_bytes_per_slot == 2 * (1024 + 4608) * 2 * 2 * 64 * 2
    assert "(positions in the KV cache: 4,608 in 2 layers, 1,024 in 2 layers)" in str(answer)
    assert serving_as_json(answer)["layers_by_cached_positions"] == {4608: 2, 1024: 2}
    long, short = (model.resized(context=context) for context in (65536, 512))
    assert long.kv_bytes_per_slot - model.kv_bytes_per_slot == 2 * 61440 * 2 * 2 * 64 * 2
    assert short.positions == [1024] * 4  # no rolling buffer is shorter than the context


@pytest.mark.parametrize("target", ["cpu:1", "h100:1", "v5e:1x1"])
def test_one_slot_more_than_the_largest_number_does_not_fit(planned, target):
    answer = planned([f"program.target={target}", "program.mesh={}", "program.batch.seq_len=32768"])
    model, memory = answer.assessment.model, answer.assessment.memory
    memory = dataclasses.replace(memory, capacity=memory.peak + 40 * model.kv_bytes_per_slot)
    slots, context = most_slots(model, memory).value, longest_context(model, memory).value
    assert 8 < slots <= 48 and context > model.context

    def needed(**sizes):
        return max(memory_at(model.resized(**sizes), memory).values())

    assert needed(slots=slots) <= memory.capacity < needed(slots=slots + 1)
    assert needed(context=context) <= memory.capacity < needed(context=context + 1)


def test_slots_are_a_multiple_of_the_devices_that_divide_them(planned):
    answer = planned(
        ["program.target=v5e:2x4", "program.mesh={data=8}", "program.batch.seq_len=131072"]
    )
    assert answer.largest_slots > 0 and answer.largest_slots % 8 == 0


def test_learned_positions_limit_the_context(planned):
    learned = ["program.model.positions=learned", "program.model.max_position_embeddings=512"]
    limit = planned([*H100, *learned]).assessment.context
    assert (limit.value, limit.limited_by) == (512, "model")
    assert "512, all positions of the model (estimate)" in str(planned([*H100, *learned]))


def test_decode_reads_weights_and_cache_and_computes_every_slot(planned):
    answer = planned(H100)
    model, (one, all_slots, prefill) = answer.assessment.model, answer.assessment.speeds
    lookup = 2 * 4096 * 512
    for speed, slots in ((one, 1), (all_slots, 8)):
        read = model.weights_bytes - lookup + slots * model.kv_bytes_per_slot
        assert speed.memory == pytest.approx(read / 3352e9)
        flops = slots * sum(forward_flops_by_part(model.native.model, 1024).values())
        assert speed.compute == pytest.approx(flops / 989.4e12)
        assert speed.tokens_per_second == pytest.approx(slots / speed.memory)
    assert prefill.tokens == 512 and prefill.tokens_per_second > all_slots.tokens_per_second


def test_tensor_sends_and_data_does_not(planned):
    tensor = planned(["program.target=h100:4", "program.mesh={tensor=4}"]).assessment
    reduced = [one for one in tensor.collectives if one.op == "all-reduce"]
    assert sum(one.count for one in reduced) == 4 + 4 + 1
    assert {one.bytes for one in reduced} == {8 * 512 * 2}
    assert all(speed.communication["tensor"] > 0 for speed in tensor.speeds)
    assert not planned(["program.target=h100:4", "program.mesh={data=4}"]).assessment.collectives


def test_speeds_that_a_machine_does_not_tell_are_unknown(planned):
    speeds = planned(["program.target=cpu:2", "program.mesh={data=2}"]).assessment.speeds
    assert {speed.tokens_per_second for speed in speeds} == {None}
    assert "unknown" in str(planned(["program.target=cpu:2", "program.mesh={data=2}"]))


def test_fsdp_is_named_with_the_weights_that_it_gathers(planned):
    answer = planned(["program.target=h100:4", "program.mesh={fsdp=4}"])
    (finding,) = answer.assessment.findings
    weights = 4 * answer.assessment.memory.weights / 1e6
    assert finding.startswith("every device gathers ") and "program.mesh.tensor" in finding
    assert float(finding.split()[3].replace(",", "")) == pytest.approx(weights, rel=0.01)


def test_what_does_not_fit_says_which_slots_and_context_would(planned):
    large = ["program.serve.slots=4096", "program.serve.context_length=65536"]
    answer = planned([*H100, *large])
    assert not answer.fits and answer.peak_bytes > answer.assessment.memory.capacity
    (finding,) = answer.assessment.findings
    assert f"program.serve.slots={answer.largest_slots}" in finding
    assert f"program.serve.context_length={answer.longest_context}" in finding
    assert str(answer).splitlines()[-1].startswith("does not fit h100:1: peak ")


def test_weights_that_are_larger_than_the_device_fit_with_no_slots(planned):
    answer = planned(["program.target=v5e:1x1", "program.mesh={}", "program.model.mlp=1048576"])
    assert (answer.largest_slots, answer.longest_context) == (0, 0)
    assert "no number of slots fits: the weights take" in answer.assessment.findings[0]


def test_generating_needs_no_scores_and_no_decode_of_all_slots(planned):
    programs = planned(H100, "generate").assessment.memory.programs
    assert [one.graph for one in programs] == [
        "prefill_32", "prefill_64", "prefill_128", "prefill_320", "prefill_512", "decode_one",
    ]  # fmt: skip


def test_json_has_the_same_numbers(planned):
    answer = planned(["program.target=h100:4", "program.mesh={tensor=4}"])
    contents = json.loads(json.dumps(serving_as_json(answer)))
    memory = contents["memory"]
    assert memory["weights_bytes"] == answer.assessment.memory.weights
    assert memory["peak_bytes"] == answer.peak_bytes
    assert contents["largest_slots"]["value"] == answer.largest_slots
    arrays = [row for row in contents["arrays"] if row["path"].startswith("state/kv_cache/")]
    assert sum(row["bytes"] for row in arrays) == memory["kv_cache_bytes"]
    assert contents["kv_cache_bytes_per_slot"] * contents["slots"] == memory["kv_cache_bytes"]


def test_a_number_of_slots_that_a_compiler_refuses_is_replaced_by_one_that_it_accepts(
    planned, vary, tmp_path, monkeypatch
):
    """The compiler needs half of the KV cache more than arithmetic expects."""

    def compiled(program, purpose, cache, observe, only):
        sizes = served_sizes(serving_program(program))
        tried.append(sizes.slots)
        peak = sizes.resident_bytes + temporaries(sizes, only[0]) + sizes.kv_cache_bytes // 2
        inputs = dict.fromkeys(sizes.plan.layouts)
        return {only[0]: Artifact(b"", {"memory": {"peak": peak}, "inputs": inputs})}, {}

    tried: list[int] = []
    monkeypatch.setattr("graphtrain.planning.serving_limits.compile_serving", compiled)
    assessment = planned(H100).assessment
    model, memory = assessment.model, assessment.memory
    memory = dataclasses.replace(memory, capacity=memory.peak + 100 * model.kv_bytes_per_slot)
    found = confirmed_slots(
        vary(H100), model, memory, most_slots(model, memory), Cache(tmp_path), lambda *_: None
    )
    first, *_, last = tried
    assert (found.value, found.source) == (last, "compiler") and 60 < last < first
