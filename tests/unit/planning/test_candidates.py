"""Strategies of a program that keeps weights as they are."""

from graphtrain.config.schema import Adapter, Batch, Loss, Model, Program
from graphtrain.planning.candidates import candidates

MODEL = Model(layers=4, embed=64, heads=4, mlp=128, vocab=256)


def test_pipelines_of_pairs_are_candidates_and_no_half_of_a_pair():
    program = Program(
        target="h100:4",
        model=MODEL,
        batch=Batch(global_batch_size=8, seq_len=32),
        loss=Loss(kind="dpo"),
        adapter=Adapter(rank=4, alpha=8.0, base_dtype="nf4"),
    )
    found = list(candidates(program))
    assert {one.mesh.axes["stage"] for one in found} == {1, 2, 4}
    assert {one.program.batch.microbatches for one in found} == {1, 2, 4}
    assert all(one.memory.frozen > 0 for one in found)
