"""A Flax module of the user as the model of a program."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graphtrain as gt
from graphtrain.compile import worker
from graphtrain.compile.request_keys import request_keys
from graphtrain.config import render
from graphtrain.config.identity import mathematics
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Config, Data, FlaxModel, Loss, Mesh, Program, Run
from graphtrain.errors import ConfigError
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.plan import plan_program
from graphtrain.models.flax_module import FlaxLanguageModel
from graphtrain.models.layer_terms import NO_TERMS
from lowering.trees import flatten
from sharding_rules.errors import ShardingError

EXAMPLE = Path(__file__).parents[2] / "examples/bring-your-own/recurrence.py"
MODEL = FlaxModel(
    flax=f"{EXAMPLE}:Recurrence", arguments={"embed": 16, "mlp": 32}, vocab=24, dtype="float32"
)
PROGRAM = Program(
    target="cpu:8",
    mesh=Mesh(fsdp=4, tensor=2),
    model=MODEL,  # pyright: ignore[reportArgumentType]
    batch=Batch(global_batch_size=8, seq_len=8),
)


@pytest.fixture(autouse=True)
def path_of_its_own(monkeypatch):
    """Directories of imported files are on sys.path only during a test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def model(tmp_path: Path, source: str) -> FlaxLanguageModel:
    """The model of a module with this source."""
    head = "import jax.numpy as jnp\nfrom flax import nnx\n"
    (tmp_path / "mine.py").write_text(head + source)
    return FlaxLanguageModel(FlaxModel(flax=f"{tmp_path}/mine.py:M", vocab=4, dtype="float32"))


def test_weights_are_named_and_sharded_by_their_axes():
    layouts = plan_program(resolve(PROGRAM)).layouts
    assert layouts["state/parameters/blocks/0/up"].split == (("fsdp",), ("tensor",))
    assert layouts["state/parameters/tokens"].split == (("tensor",), ("fsdp",))
    assert layouts["state/optimizer/adam/mu/blocks/1/down"].split == (("tensor",), ("fsdp",))


def test_its_logits_are_those_of_the_module_and_see_no_later_token():
    arguments = {"embed": 16, "mlp": 32, "blocks": 1}
    opened = FlaxLanguageModel(dataclasses.replace(MODEL, arguments=arguments))
    parameters = opened.initialize(jax.random.key(0))
    assert {path: value.shape for path, value in flatten(parameters).items()} == {
        path: spec.shape for path, spec in flatten(opened.specs()).items()
    }
    tokens = jnp.arange(8).reshape(2, 4)
    forward = jax.jit(opened.forward)
    logits, added = forward(parameters, tokens)
    rngs = nnx.Rngs(jax.random.key(0))
    module = MODEL.user_code.load()(24, jnp.dtype("float32"), rngs, **arguments)
    np.testing.assert_allclose(logits, jax.jit(module)(tokens), rtol=1e-5, atol=1e-6)
    assert added == NO_TERMS
    changed, _ = forward(parameters, tokens.at[0, 2].set(23))
    np.testing.assert_array_equal(changed[0, :2], logits[0, :2])
    assert not np.array_equal(changed[0, 2:], logits[0, 2:])


def test_its_training_step_can_be_traced():
    assert worker.lower(resolve(PROGRAM), "train").name == "train"


def test_an_edit_changes_keys_and_identity(tmp_path):
    (tmp_path / "mine.py").write_text(EXAMPLE.read_text())
    settings = dataclasses.replace(MODEL, flax=f"{tmp_path}/mine.py:Recurrence")
    program = dataclasses.replace(PROGRAM, model=settings)
    config = Config(program=program, run=Run(directory="r", steps=1, data=Data(train="data")))
    before = request_keys(resolve(program))["train"], mathematics(config)
    (tmp_path / "mine.py").write_text(EXAMPLE.read_text() + "\n# an edit\n")
    (difference,) = request_keys(resolve(program))["train"].differences(before[0])
    assert difference.path == ("program", "model", "flax", "sources", "mine.py")
    assert mathematics(config) != before[1] and json.dumps(mathematics(config))
    assert gt.load_config(render(config)) == config


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("M = lambda vocab, dtype, rngs: 3", ConfigError, r"returned int, not a flax\.nnx\.Module"),
        (
            "class M(nnx.Module):\n def __init__(self, vocab, dtype, rngs):\n"
            "  self.w = nnx.Param(jnp.ones((4, 4)))\n",
            ShardingError,
            r"w has shape \(4, 4\) and no axes; name them",
        ),
        (
            "class M(nnx.Module):\n def __init__(self, vocab, dtype, rngs):\n"
            "  self.w = nnx.Param(jnp.ones((4, 4)), axes=('embed', 'haeds'))\n",
            ShardingError,
            "haeds",
        ),
        (
            "class M(nnx.Module):\n def __init__(self, vocab, dtype, rngs):\n"
            "  self.drop = nnx.Dropout(0.1, rngs=rngs)\n",
            ConfigError,
            "only parameters are supported, no dropout",
        ),
    ],
)
def test_what_is_no_module_with_named_axes_is_refused(tmp_path, source, error, message):
    with pytest.raises(error, match=message):
        model(tmp_path, source).specs()


def test_wrong_logits_and_errors_of_the_module_name_it(tmp_path):
    head = "class M(nnx.Module):\n def __init__(self, vocab, dtype, rngs): self.w = "
    head += "nnx.Param(jnp.ones(4))\n def __call__(self, tokens): return "
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ConfigError, match=r"must return logits of shape \(1, 2, 4\)"):
        model(tmp_path, head + "tokens").forward({"w": jnp.ones(4)}, tokens)
    with pytest.raises(ConfigError, match=r"raised NameError: .*\(mine\.py:5\)"):
        model(tmp_path, head + "nothing").forward({"w": jnp.ones(4)}, tokens)


def test_what_needs_more_of_a_model_is_refused():
    with pytest.raises(ValueError, match=r'loss.kind = "dpo" cannot be used with model\.flax'):
        dataclasses.replace(PROGRAM, loss=Loss(kind="dpo"))
    with pytest.raises(ValueError, match="not told where documents begin"):
        batch = Batch(global_batch_size=8, seq_len=8, cross_document_attention=False)
        dataclasses.replace(PROGRAM, batch=batch)
    with pytest.raises(ValueError, match=r"model\.flax has no pipeline stages"):
        batch = Batch(global_batch_size=8, seq_len=8, microbatches=2)
        dataclasses.replace(PROGRAM, mesh=Mesh(stage=2, data=4), batch=batch)
    with pytest.raises(ConfigError, match="no KV cache"):
        open_language_model(PROGRAM.model).cached_layers()
