import pytest

from graphtrain.config.schema import Batch, Mixture, Model, Optimizer, Program
from graphtrain.estimates.arrays import parameter_arrays, state_arrays
from graphtrain.models.counts import parameter_count
from graphtrain.models.decoder import parameter_specs
from graphtrain.steps import state_specs_of
from lowering.trees import flatten

SIZES = {"layers": 3, "embed": 16, "heads": 4, "mlp": 24, "vocab": 32}
GPT2 = {"positions": "learned", "max_length": 8, "norm": "layer", "bias": "all", "tied_head": True}
MODELS = [
    Model(**SIZES, kv_heads=2),
    Model(**SIZES, **GPT2, activation="gelu"),
    Model(**SIZES, mixture=Mixture(experts=4), kv_heads=2),
    Model(**SIZES, merged_gate=True, bias="all"),
    Model(**SIZES, bias="qkv", positions="alibi", activation="geglu"),
]


@pytest.mark.parametrize("model", MODELS)
def test_arrays_by_arithmetic_are_those_that_tracing_finds(model):
    assert parameter_arrays(model) == flatten(parameter_specs(model))
    sizes = (spec.nbytes // 4 for spec in parameter_arrays(model).values())
    assert sum(sizes) == parameter_count(model)


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(moments="bfloat16", offload=True)])
def test_so_are_weights_and_moments(optimizer):
    program = Program(model=MODELS[0], batch=Batch(sequences=4, length=8), optimizer=optimizer)
    traced = flatten({"state": state_specs_of(program)})
    others = {"state/step", "state/key", "state/optimizer/adam/count"}
    assert {path: spec for path, spec in traced.items() if path not in others} == state_arrays(
        MODELS[0], optimizer
    )
