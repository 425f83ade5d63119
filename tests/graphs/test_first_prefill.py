"""The first prompt of a process: its layers in a loop, and a program that is loaded sooner."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import LLAMA, loaded, program, state_of

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Serve
from graphtrain.errors import TrainingError
from graphtrain.graphs import names
from graphtrain.graphs.names import first_prefill_size, graphs_for
from graphtrain.run.serving.engine import CompiledEngine
from graphtrain.run.serving.engine_protocol import SamplingParameters
from lowering.xla import backend as xla

SERVE = Serve(slots=2, context_length=96, prefill=(16, 64), tokens_per_call=2)
DEEP = dataclasses.replace(LLAMA, layers=6)
GREEDY = SamplingParameters(temperature=0.0, max_tokens=4)


class _Graphs:
    """Graphs of a program; of those that process a prompt, only the first is loaded at first."""

    def __init__(self, of):
        self.served, listed = graphs_for(resolve(of), "generate")
        self.keys = dict.fromkeys(listed)
        self._compiled = {name: loaded.__wrapped__(self.served.settings, name) for name in listed}
        self.used: list[str] = []
        self.loaded = {"first_prefill_64"}

    def __getitem__(self, name):
        self.used.append(name)
        return self._compiled[name]

    def inputs(self, name, argument):
        return self._compiled[name].inputs(argument)

    def is_loaded(self, name):
        return name in self.loaded


def engine_of(of, graphs, scale=1.0):
    """An engine whose weights are those of seed 0, multiplied by a number."""
    described = graphs["serve_init"].inputs("parameters")
    parameters = jax.tree.map(lambda array: array * scale, state_of(of)["parameters"])
    parameters = xla.to_devices(parameters, described)
    return CompiledEngine(graphs.served, graphs, parameters, weights_name="random")


def continued(engine, slot, prompt, offset=0):
    """The tokens after a prompt, with their log-probabilities."""
    first = engine.prefill(slot, prompt[offset:], offset, GREEDY, prompt=prompt)
    return [first, *(choice for _ in range(2) for choice in engine.decode()[slot])]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_first_prompt_is_continued_as_all_others_are(dtype, monkeypatch):
    monkeypatch.setattr(names, "_FEWEST_LAYERS", 2)
    of = program(serve=dataclasses.replace(SERVE, weights_dtype=dtype))
    graphs = _Graphs(of)
    engine = engine_of(of, graphs)
    prompt = np.random.default_rng(0).integers(0, 64, 40).tolist()

    def of_all() -> list:
        graphs.used.clear()
        begun = continued(engine, 1, prompt[:20])
        engine.release(1)
        reused = continued(engine, 1, prompt, offset=20)
        engine.release(1)
        # 64 tokens would reach beyond the end of the KV cache.
        at_end = continued(engine, 1, [*prompt[:20], *prompt[:20], *prompt], offset=70)
        engine.release(1)
        return [*begun, *reused, *at_end]

    first = of_all()
    assert [name for name in graphs.used if "prefill" in name] == [
        "first_prefill_64", "first_prefill_64", "prefill_16",
    ]  # fmt: skip
    graphs.loaded |= {"prefill_16", "prefill_64"}
    later = of_all()
    assert not any("first" in name for name in graphs.used)
    assert [choice.token for choice in first] == [choice.token for choice in later]
    np.testing.assert_allclose(
        [choice.log_prob for choice in first], [choice.log_prob for choice in later], atol=1e-5
    )


def test_logits_of_a_first_prompt_that_are_not_finite_are_an_error(monkeypatch):
    monkeypatch.setattr(names, "_FEWEST_LAYERS", 2)
    of = program(serve=dataclasses.replace(SERVE, weights_dtype="bfloat16"))
    graphs = _Graphs(of)
    engine = engine_of(of, graphs, scale=float("nan"))
    with pytest.raises(TrainingError, match="not finite") as failed:
        engine.prefill(1, [1, 2, 3], 0, GREEDY, prompt=[1, 2, 3])
    assert graphs.used[-1] == "first_prefill_64"
    assert "overflow float32" in str(failed.value) and "serve.dtype" not in str(failed.value)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 2},
        {"sliding_window": 24, "global_attention_every": 2},
        {"mlp": 1 << 23},  # copying a layer would take longer
    ],
)
def test_models_that_gain_nothing_have_no_program_of_their_own_for_a_first_prompt(change):
    deep = resolve(program(model=DEEP, serve=SERVE))
    assert first_prefill_size(graphs_for(deep, "serve")[0]) == 64
    other = resolve(program(model=dataclasses.replace(DEEP, **change), serve=SERVE))
    served, listed = graphs_for(other, "serve")
    assert first_prefill_size(served) is None
    assert not any("first_prefill" in name for name in listed)
