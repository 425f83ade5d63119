"""Log-probabilities of packed texts, and from slots, against the model on whole texts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import CUBE, LLAMA, loaded, program, state_of

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Serve
from graphtrain.graphs.names import graphs_for
from graphtrain.graphs.open_model import open_language_model
from graphtrain.models.attention import packed
from graphtrain.run.evaluation.continuation_scores import ScoredText
from graphtrain.run.evaluation.packed_scores import score_texts
from graphtrain.run.serving.engine import CompiledEngine
from lowering.xla import backend as xla

SERVE = Serve(slots=4, context_length=400, prefill=(16, 32))
# In a context of 400, one of its layers has a rolling buffer of 256 positions.
WINDOWS = dataclasses.replace(LLAMA, sliding_window=24, global_attention_every=2)


class _Graphs:
    """Graphs of a program, compiled when they are used."""

    def __init__(self, of):
        self.served, names = graphs_for(resolve(of), "evaluate")
        self.keys = dict.fromkeys(names)
        self._loaded = {}

    def __getitem__(self, name):
        if name not in self._loaded:
            self._loaded[name] = loaded.__wrapped__(self.served.settings, name)
        return self._loaded[name]


@pytest.mark.parametrize("where", ["mesh", "alone"])
def test_scores_are_those_of_the_model_on_whole_texts(where, monkeypatch):
    monkeypatch.setattr(packed, "_TILE", 8)  # a row has several
    of = program(model=WINDOWS, serve=SERVE, **CUBE if where == "mesh" else {})
    parameters = state_of(of)["parameters"]
    graphs = _Graphs(of)
    for name in graphs.keys:
        graphs[name]  # compiled before tracing is forbidden
    described = graphs["serve_init"].inputs("parameters")
    engine = CompiledEngine(
        graphs.served, graphs, xla.to_devices(parameters, described), weights_name="random"
    )
    random = np.random.default_rng(0)
    examples, others = (tuple(random.integers(0, 64, 330).tolist()) for _ in range(2))
    contexts = [examples[:300], others[:60], *((*examples, token) for token in range(5))]
    ends = [(1,), (2,), (3, 4, 5), (3, 4, 6), tuple(range(30)), tuple(range(40))]
    texts = [ScoredText((*context, *end), len(context)) for context in contexts for end in ends]
    got = dict(score_texts(engine, texts))

    model, longest = open_language_model(of.model), max(len(text.tokens) for text in texts)
    tokens = np.zeros((len(texts), longest), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text.tokens)] = text.tokens
    logits, _ = jax.jit(model.forward)(parameters, jnp.array(tokens))
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    for index, text in enumerate(texts):
        positions = np.arange(text.begin, len(text.tokens))
        rows, wanted = log_probs[index, positions - 1], np.array(text.tokens)[positions]
        expected = rows[np.arange(len(wanted)), wanted].sum()
        np.testing.assert_allclose(got[index].log_prob, expected, atol=1e-4)
        assert got[index].is_greedy == (rows.argmax(-1) == wanted).all()
