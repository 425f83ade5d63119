"""Sequences split by position give the numbers of one device, by ring and by all-to-all."""

import dataclasses

import pytest
from programs import GPT2, LLAMA, program
from test_parallel import assert_close, loss_and_gradients

from graphtrain.config.schema import Mesh

BLOOM = dataclasses.replace(LLAMA, positions="alibi", norm="layer", activation="gelu")
MODELS = {"llama": LLAMA, "gpt2": GPT2, "bloom": BLOOM}
RING, ULYSSES = ("data", "fsdp", "context", "tensor"), ("data", "fsdp", "ulysses", "tensor")
WAYS = {
    "ring 8": {"mesh": Mesh(context=8), "rules": RING},
    "ring 4": {"mesh": Mesh(data=2, context=4), "rules": RING},
    "ring 2": {"mesh": Mesh(data=4, context=2), "rules": RING},
    "ring, fsdp": {"mesh": Mesh(fsdp=2, context=4), "rules": RING},
    "ring, tensor": {"mesh": Mesh(data=2, context=2, tensor=2), "rules": RING},
    "ring, sequence": {"mesh": Mesh(context=4, tensor=2), "rules": (*RING, "sequence")},
    "ulysses": {"mesh": Mesh(data=2, context=4), "rules": ULYSSES},
    "ulysses, tensor": {"mesh": Mesh(fsdp=2, context=2, tensor=2), "rules": ULYSSES},
    "ulysses, sequence": {
        "mesh": Mesh(data=2, context=2, tensor=2),
        "rules": (*ULYSSES, "sequence"),
    },
}


CASES = [
    *(("llama", way) for way in WAYS),
    *(("gpt2", way) for way in ("ring 4", "ring, sequence", "ulysses")),
    *(("bloom", way) for way in ("ring, tensor", "ulysses, tensor")),
]


@pytest.mark.parametrize(("model", "way"), CASES, ids=map(" on ".join, CASES))
def test_loss_and_gradients_equal_those_of_one_device(model, way):
    assert_close(
        loss_and_gradients(program(model=MODELS[model], target="cpu:8", **WAYS[way])),
        loss_and_gradients(program(model=MODELS[model])),
    )
