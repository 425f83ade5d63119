"""Sizes of the graphs of generation."""

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Model, Program
from graphtrain.graphs.decode import generation_graph
from lowering.trees import flatten


@pytest.mark.parametrize(("seq_len", "tokens", "longest"), [(8, 8, 8), (64, 64, 64), (96, 64, 128)])
def test_no_call_has_more_tokens_than_the_context(seq_len, tokens, longest):
    """A model has no learned positions beyond it."""
    model = Model(layers=1, embed=8, heads=2, mlp=8, vocab=16, positions="learned",
                  max_position_embeddings=seq_len)  # fmt: skip
    batch = Batch(global_batch_size=1, seq_len=seq_len)
    program = resolve(Program(target="cpu:1", model=model, batch=batch))
    graph = generation_graph(program, "prefill")
    assert graph.inputs["tokens"].shape == (1, tokens)
    assert all(longest in spec.shape for spec in flatten(graph.inputs["kept"]).values())
