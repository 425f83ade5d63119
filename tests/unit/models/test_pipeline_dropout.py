"""LoRA dropout of arrays that are in no pipeline stage."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from graphtrain.graphs import pipeline_weights
from lowering.pipeline.schedule import PartWeights, Pipeline
from sharding_rules.errors import ShardingError

TRAINED = {"project_in": {"weight": {"lora_a": jnp.ones((2, 3)), "lora_b": jnp.ones((4, 2))}}}


@pytest.fixture
def make(monkeypatch):
    """Return what makes a pipeline with an adapter, with or without dropout keys."""
    model = SimpleNamespace(
        apply_lora=lambda *_: {"weight": jnp.ones(())}, row_stages=lambda stages: stages
    )
    monkeypatch.setattr(pipeline_weights, "open_language_model", lambda _: model)
    ends = {"first": lambda p, *_: p["weight"], "last": lambda p, *_: (p["weight"], {})}
    pipeline, program = Pipeline(stage=lambda *_: None, **ends), SimpleNamespace(model=None)  # type: ignore[arg-type]
    program.settings = None
    return lambda keys: pipeline_weights.with_adapter(pipeline, program, None, keys)  # type: ignore[arg-type]


def test_dropout_before_or_after_the_layers_is_refused(make):
    weights = PartWeights(TRAINED, None)
    with pytest.raises(ShardingError, match="project_in/weight is in none; set dropout = 0"):
        make(jax.random.key).first(weights, {}, jnp.int32(0))
    with pytest.raises(ShardingError, match="project_in/weight is in none; set dropout = 0"):
        make(jax.random.key).last(weights, jnp.ones(()), {})
    assert make(None).first(weights, {}, jnp.int32(0)) == 1
    assert make(jax.random.key).first(PartWeights({}, None), {}, jnp.int32(0)) == 1
