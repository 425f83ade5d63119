"""MLPs in blocks, and the head's gradient in blocks and reduced first, beside one device."""

from dataclasses import replace

import numpy as np
import pytest
from programs import LLAMA, alone, batch, loaded, placed_inputs, program, state_of

from graphtrain.config.schema import Batch, Loss, Mesh
from graphtrain.graphs import build, objectives
from graphtrain.models import chunked_loss
from lowering.trees import flatten


@pytest.mark.parametrize("rules", [("data", "fsdp"), ("data", "zero1")], ids="+".join)
def test_gradients_equal_those_of_one_device(rules, monkeypatch):
    of = program(
        target="cpu:8",
        mesh=Mesh(data=2, fsdp=4) if "fsdp" in rules else Mesh(data=8),
        rules=rules,
        model=replace(LLAMA, remat="full", bias="all"),
        batch=Batch(global_batch_size=16, seq_len=16, microbatches=2),
        loss=Loss(chunk=16),
    )
    want = gradients(alone(of))
    monkeypatch.setattr(build, "mlp_block_count", lambda program: 8)
    monkeypatch.setattr(objectives, "head_blocks", lambda program, chunk: 4)
    monkeypatch.setattr(chunked_loss, "parts_of_chunk", lambda *_: 2)
    monkeypatch.setattr(build, "reduces_head_first", lambda program: True)
    for path, got in gradients(of).items():
        np.testing.assert_allclose(got, want[path], rtol=1e-4, atol=1e-6, err_msg=path)


def gradients(of):
    executable = loaded(of, "gradients")
    inputs = {"state": state_of(of), "batch": batch(of)}
    placed = [placed_inputs(executable, name, tree) for name, tree in inputs.items()]
    return flatten(executable(*placed)["gradients"])
