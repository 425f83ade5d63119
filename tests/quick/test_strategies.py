"""One case of each strategy gives the loss and gradients of one device; tests/graphs has more."""

from dataclasses import replace

import pytest
from programs import LLAMA, program
from test_context import WAYS as CONTEXT
from test_mixture import DROPLESS, mixed
from test_mixture import WAYS as EXPERT
from test_parallel import MESHES
from test_pipeline import ONE_ONE, assert_equals_one_device, in_stages
from test_zero import WAYS as ZERO

from graphtrain.config.schema import Batch, Mesh

TWO_MICROBATCHES = Batch(global_batch_size=8, seq_len=16, microbatches=2)
PADDED = replace(LLAMA, vocab_padding=3)  # all in the last shard of the vocabulary
STRATEGIES = {
    "data": program(**MESHES["data"]),
    "zero1": program(target="cpu:8", **ZERO["zero1"]),
    "zero2": program(target="cpu:8", **ZERO["zero2"]),
    "fsdp": program(**MESHES["fsdp"]),
    "tensor": program(model=PADDED, **MESHES["tensor"]),
    "sequence": program(**MESHES["sequence"]),
    "context": program(target="cpu:8", **CONTEXT["ring 4"]),
    "expert": mixed(DROPLESS, target="cpu:4", mesh=EXPERT["expert"]),
    "pipeline": in_stages(ONE_ONE, Mesh(stage=2), model=LLAMA, batch=TWO_MICROBATCHES),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_and_gradients_equal_those_of_one_device(strategy):
    assert_equals_one_device(STRATEGIES[strategy])
