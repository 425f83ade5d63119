"""ZeRO and deferred reduction: the numbers of one device, with the traffic each promises."""

import pytest
from programs import GPT2, LLAMA, batch, program
from test_parallel import assert_close, loss_and_gradients

from graphtrain.config.schema import Batch, Mesh

WAYS = {
    "zero1": {"mesh": Mesh(data=8), "rules": ("zero1",)},
    "zero2": {"mesh": Mesh(data=8), "rules": ("zero2",)},
    "zero1-tensor-sequence": {
        "mesh": Mesh(data=4, tensor=2),
        "rules": ("zero1", "tensor", "sequence"),
    },
    "zero2-fsdp": {"mesh": Mesh(data=2, fsdp=4), "rules": ("zero2", "fsdp")},
    "zero1-fsdp-tensor": {
        "mesh": Mesh(data=2, fsdp=2, tensor=2),
        "rules": ("zero1", "fsdp", "tensor", "sequence"),
    },
}


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduce", ["each", "last"])
def test_loss_and_gradients_equal_those_of_one_device(way, reduce, model):
    sizes = Batch(sequences=16, length=16, microbatches=2)
    alone = program(model=model, batch=sizes)
    parts = Batch(sequences=16, length=16, microbatches=2, reduce=reduce)
    split = program(model=model, target="cpu:8", batch=parts, **WAYS[way])
    assert_close(loss_and_gradients(split, batch(alone)), loss_and_gradients(alone))


def test_a_single_microbatch_can_be_reduced_last():
    sizes = Batch(sequences=8, length=16, reduce="last")
    split = program(target="cpu:8", mesh=Mesh(data=8), rules=("zero1",), batch=sizes)
    assert_close(loss_and_gradients(split), loss_and_gradients(program()))
