"""Order of gradients: MLPs in blocks or weights first, the head's in blocks and reduced first."""

from dataclasses import replace

import numpy as np
import pytest
from compared_collectives import sent
from programs import LLAMA, alone, batch, loaded, placed_inputs, program, state_of

from graphtrain.config.schema import Batch, Loss, Mesh
from graphtrain.graphs import build, objectives
from graphtrain.models import chunked_loss, mlp_blocks
from lowering.hlo.collectives import Collective
from lowering.trees import flatten

CUBE = Mesh(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("rules", "mesh", "in_loop"),
    [
        (("data", "fsdp"), Mesh(data=2, fsdp=4), False),
        (("data", "zero1"), Mesh(data=8), False),
        (("data", "fsdp", "tensor"), CUBE, False),
        (("data", "fsdp", "tensor", "sequence"), CUBE, False),
        (("data", "fsdp", "tensor", "sequence"), CUBE, True),  # as for TPUs
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_device(rules, mesh, in_loop, monkeypatch):
    of = program(
        target="cpu:8",
        mesh=mesh,
        rules=rules,
        model=replace(LLAMA, remat="full", bias="all"),
        batch=Batch(global_batch_size=16, seq_len=16, microbatches=1 if in_loop else 2),
        loss=Loss(chunk=16),
    )
    want = gradients(alone(of))
    monkeypatch.setattr(build, "mlp_block_count", lambda program: 8)
    monkeypatch.setattr(mlp_blocks, "on_tpu", lambda: in_loop)
    monkeypatch.setattr(objectives, "head_blocks", lambda program, chunk: 4)
    monkeypatch.setattr(chunked_loss, "parts_of_chunk", lambda *_: 2)
    monkeypatch.setattr(build, "reduces_head_first", lambda program: True)
    for path, got in gradients(of).items():
        np.testing.assert_allclose(got, want[path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [({"data": 2, "fsdp": 4}, ("data", "fsdp")), ({"data": 8}, ("zero2",))],
    ids=str,
)
def test_gradients_with_weights_first_are_those_of_one_device_and_send_no_more(
    mesh, rules, monkeypatch
):
    batch = Batch(global_batch_size=16, seq_len=16, microbatches=2)
    model = replace(LLAMA, bias="all")
    of = program(target="cpu:8", mesh=Mesh(**mesh), rules=rules, model=model, batch=batch)
    want, sent_before = gradients(alone(of)), sent_by(of)
    monkeypatch.setattr(build, "computes_weights_first", lambda program: True)
    loaded.cache_clear()
    for path, got in gradients(of).items():
        np.testing.assert_allclose(got, want[path], rtol=1e-4, atol=1e-6, err_msg=path)
    assert sent_by(of) <= sent_before
    loaded.cache_clear()


def sent_by(of):
    collectives = loaded(of, "gradients").record["collectives"]
    return sent(tuple(Collective.from_record(each) for each in collectives))


def gradients(of):
    executable = loaded(of, "gradients")
    inputs = {"state": state_of(of), "batch": batch(of)}
    placed = [placed_inputs(executable, name, tree) for name, tree in inputs.items()]
    return flatten(executable(*placed)["gradients"])
