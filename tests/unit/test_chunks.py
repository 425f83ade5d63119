"""How many positions' logits a program has at once, left to itself or told."""

import dataclasses

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Adapter,
    Batch,
    Loss,
    Mesh,
    Model,
    PipelineSettings,
    Program,
)
from graphtrain.cost_model.memory import memory
from graphtrain.models.chunk_size import (
    Logits,
    best_chunk,
    head_blocks,
    loss_chunk,
    parts_of_chunk,
)
from graphtrain.models.mlp_block_count import mlp_block_count
from graphtrain.planning.assess import estimate
from graphtrain.planning.json_output import assessment_as_json
from sharding_rules.errors import ShardingError
from sharding_rules.plan import make_plan

GB = 10**9
MODEL = Model(layers=8, embed=1024, heads=16, mlp=2816, vocab=32_000)
AHEAD = dataclasses.replace(MODEL, mtp_loss_weight=0.3)
SHORT = Batch(global_batch_size=64, seq_len=128)
PARTS = Batch(global_batch_size=64, seq_len=2048, microbatches=8)
DATA = Program(target="h100:8", model=MODEL, batch=Batch(global_batch_size=64, seq_len=2048))


def chunk(**changes):
    of = dataclasses.replace(DATA, **changes)
    return loss_chunk(resolve(of))


@pytest.mark.parametrize(
    ("sequences", "positions", "vocab", "embed", "parameters", "memory_bytes", "chunk"),
    [
        (8, 2048, 32_000, 1024, 0.2 * GB, 80 * GB, 128),  # 1,024 tokens
        (1, 8192, 32_000, 1024, 0.2 * GB, 80 * GB, 1024),
        (5, 2048, 32_000, 1024, 0.2 * GB, 80 * GB, 256),  # 128 would be fewer tokens
        (8, 2040, 32_000, 1024, 0.2 * GB, 80 * GB, 136),  # divides, in tiles
        (2, 4096, 32_000, 4096, 6.7 * GB, 80 * GB, 512),  # the head is little of the step
        (8, 2048, 128_256, 1024, 0.2 * GB, 16 * GB, 128),  # logits that would fill the device
        (1, 2048, 32_000, 1024, 0.2 * GB, 80 * GB, None),  # no more than a chunk
        (1, 8192, 32_000, 8192, 0.2 * GB, 80 * GB, None),  # the head's gradient is as large
        (8, 2048, 256, 1024, 0.2 * GB, 80 * GB, None),  # logits are small
        (8, 2047, 32_000, 1024, 0.2 * GB, 80 * GB, None),  # nothing divides it
    ],
)
def test_a_chunk_is_as_short_as_costs_little_time(
    sequences, positions, vocab, embed, parameters, memory_bytes, chunk
):
    logits = Logits(sequences, positions, vocab, embed, item=2, step_flops=6 * parameters)
    assert best_chunk(logits, memory_bytes) == chunk


@pytest.mark.parametrize(
    ("sequences", "embed", "shards", "chunk"),
    [
        (1, 4096, 64, 4096),  # twice as large as the gradient of all logits
        (1, 4096, 1, None),  # chunks of fewer would save too little
        (8, 4096, 64, 128),  # an eighth of the gradient of all logits
        (1, 1024, 64, 1024),  # half of the gradient of all logits
    ],
)
def test_all_positions_are_one_chunk_where_the_heads_gradient_is_large(
    sequences, embed, shards, chunk
):
    logits = Logits(sequences, 4096, 32_000, embed, 2, 6 * 6.7 * GB, head_shards=shards)
    assert best_chunk(logits, 80 * GB) == chunk


SEVEN = Program(
    target="h100:64",
    mesh=Mesh(fsdp=64),
    rules=("fsdp",),
    model=Model(layers=32, embed=4096, heads=32, mlp=11008, vocab=32_000),
    batch=Batch(global_batch_size=64, seq_len=4096),
)
LAST = Batch(global_batch_size=128, seq_len=4096, microbatches=2, gradient_reduction="per_step")
LAST_OF_ONE = dataclasses.replace(LAST, microbatches=1)
OVERRIDES = """
[arrays."layers/mlp/*"]
embed = []
mlp = ["fsdp"]
[arrays."embedding/tokens"]
embed = []
vocab = ["fsdp"]
"""


@pytest.mark.parametrize(
    ("changes", "positions", "blocks"),
    [
        ({}, 4096, 8),
        ({}, 2048, 1),  # a chunk of some positions
        ({"target": "v5p:4x4x4"}, 4096, 1),
        ({"mesh": Mesh(data=64), "rules": ("data",)}, 4096, 1),  # not scattered
        ({"mesh": Mesh(data=64), "rules": ("zero1",)}, 4096, 8),
        ({"mesh": Mesh(fsdp=32, tensor=2), "rules": ("fsdp", "tensor")}, 4096, 1),
        ({"mesh": Mesh(data=64), "rules": ("zero1",), "batch": LAST}, 4096, 1),
        ({"mesh": Mesh(data=64), "rules": ("zero1",), "batch": LAST_OF_ONE}, 4096, 1),
        ({"adapter": Adapter(rank=8, alpha=16.0)}, 4096, 1),
        ({"model": dataclasses.replace(SEVEN.model, vocab=32_032)}, 4096, 2),
    ],
    ids=str,
)
def test_a_head_whose_gradient_is_scattered_has_blocks_in_one_chunk(changes, positions, blocks):
    assert head_blocks(resolve(dataclasses.replace(SEVEN, **changes)), positions) == blocks


def test_rules_of_single_arrays_leave_no_blocks_of_what_they_shard(tmp_path):
    (tmp_path / "mine.toml").write_text(OVERRIDES)
    tied = dataclasses.replace(SEVEN.model, tie_word_embeddings=True, remat="full")
    for rules, is_in_blocks in ((("fsdp",), True), (("fsdp", str(tmp_path / "mine.toml")), False)):
        of = resolve(dataclasses.replace(SEVEN, model=tied, rules=rules))
        assert (head_blocks(of, 4096) > 1) == (mlp_block_count(of) > 1) == is_in_blocks


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 128),
        ({"target": "v5e:2x4"}, 128),
        ({"mesh": Mesh(fsdp=4, context=2)}, 64),  # of the 1,024 that a device has
        ({"batch": Batch(global_batch_size=128, seq_len=2048, microbatches=2)}, 128),
        ({"batch": PARTS}, None),
        ({"mesh": Mesh(data=2, tensor=4)}, 64),  # 2,048 tokens, of a quarter of the vocabulary
        ({"mesh": Mesh(data=2, tensor=4), "batch": SHORT}, None),  # logits are sharded already
        ({"mesh": Mesh(stage=8), "batch": PARTS}, 128),
        (
            {
                "mesh": Mesh(stage=8),
                "batch": PARTS,
                "pipeline": PipelineSettings(schedule="1f1b"),  # 2,048 tokens of each stage
            },
            None,
        ),
        ({"mesh": Mesh(stage=8), "batch": PARTS, "model": AHEAD}, None),  # two losses
        ({"loss": Loss(kind="dpo")}, None),
        ({"target": "cpu:8"}, None),
        ({"target": "trn1:8"}, None),
        ({"loss": Loss(chunk="none")}, None),
        ({"loss": Loss(chunk=128), "target": "cpu:8"}, 128),
    ],
    ids=str,
)
def test_only_where_it_is_known_to_pay_or_asked_for(changes, expected):
    assert chunk(**changes) == expected


def test_what_a_device_has_of_a_sequence_is_a_multiple():
    with pytest.raises(ShardingError, match="chunk = 2048 does not divide the 1024 positions"):
        chunk(mesh=Mesh(fsdp=4, context=2), loss=Loss(chunk=2048))


def test_a_number_is_refused_in_a_pipeline_with_two_losses():
    with pytest.raises(ShardingError, match=r"pipeline and program\.model\.mtp_loss_weight"):
        chunk(mesh=Mesh(stage=8), batch=PARTS, model=AHEAD, loss=Loss(chunk=256))


def test_the_estimate_has_the_chunks_of_the_program():
    def temporaries(how):
        of = dataclasses.replace(DATA, loss=Loss(chunk=how))
        return memory(resolve(of)).temporaries

    assert temporaries("auto") == temporaries(128) < temporaries("none")


def test_the_plan_tells_the_chunk():
    def told(of):
        made = resolve(of)
        return assessment_as_json(estimate(made, make_plan({}, made.rules, made.mesh)))

    assert told(DATA)["chunk"] == 128
    assert told(dataclasses.replace(DATA, target="cpu:8"))["chunk"] is None


@pytest.mark.parametrize(
    ("sequences", "positions", "parts"), [(8, 256, 8), (4, 256, 4), (1, 512, 2), (1, 1016, 1)]
)
def test_a_part_of_a_chunk_has_at_least_256_tokens(sequences, positions, parts):
    assert parts_of_chunk(sequences, positions) == parts


def test_parts_that_wait_for_reductions_have_more_tokens():
    assert [parts_of_chunk(4, positions, vocab_shards=2) for positions in (256, 1024)] == [1, 2]


def test_reductions_over_a_sharded_vocabulary_make_chunks_longer():
    logits = Logits(8, 2048, 8_000, 1024, item=2, step_flops=0.3 * GB)
    assert best_chunk(logits, 40 * GB) == 128
    assert best_chunk(dataclasses.replace(logits, vocab_shards=4), 40 * GB) == 256


def test_a_program_with_a_chunk_that_1f1b_cannot_use_is_not_resolved():
    batch = Batch(global_batch_size=64, seq_len=2048, microbatches=8)
    of = dataclasses.replace(DATA, mesh=Mesh(stage=8), batch=batch, loss=Loss(chunk=512))
    with pytest.raises(ShardingError, match=r"256 positions .* mesh.stage = 8.*circular"):
        resolve(dataclasses.replace(of, pipeline=PipelineSettings(schedule="1f1b")))
    assert loss_chunk(resolve(of)) == 512
