"""Latent attention on every kind of mesh gives the loss and gradients of one device."""

import dataclasses

import pytest
from programs import CUBE, LLAMA, program
from test_context import RING, ULYSSES
from test_pipeline import ONE_ONE, assert_equals_one_device

from graphtrain.config.schema import Batch, LatentAttention, Mesh

LATENT = LatentAttention(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=4, v_head_dim=6)
MODEL = dataclasses.replace(
    LLAMA, kv_heads=4, head_dim=10, latent_attention=LATENT, attention_sinks=True, layers=2
)
WAYS = {
    "cube": CUBE,
    "ring": {"mesh": Mesh(fsdp=2, context=2, tensor=2), "rules": RING},
    "ulysses": {"mesh": Mesh(data=2, context=2, tensor=2), "rules": ULYSSES},
    "stages": {
        "mesh": Mesh(stage=2, fsdp=2, tensor=2),
        "pipeline": ONE_ONE,
        "batch": Batch(global_batch_size=8, seq_len=16, microbatches=2),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_equal_those_of_one_device(way):
    assert_equals_one_device(program(model=MODEL, **{"target": "cpu:8"} | WAYS[way]))
