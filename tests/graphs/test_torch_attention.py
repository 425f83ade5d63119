"""Models of transformers attend as the native decoder does: by documents, and split by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import alone, loaded, program
from test_parallel import assert_close, loss_and_gradients
from torch_families import imported

from graphtrain.config.schema import Batch, Mesh
from graphtrain.models.documents import apart
from graphtrain.torch_models.errors import ImportedModelError
from graphtrain.torch_models.model import open_model

RING, ULYSSES = ("data", "fsdp", "context", "tensor"), ("data", "fsdp", "ulysses", "tensor")
APART = Batch(sequences=8, length=16, documents="apart")


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("llama", {"mesh": Mesh(data=2, context=2, tensor=2), "rules": RING}),
        ("gpt2", {"mesh": Mesh(fsdp=2, context=4), "rules": RING}),  # a table of positions
        ("gemma2", {"mesh": Mesh(data=2, context=2, tensor=2), "rules": (*ULYSSES, "sequence")}),
    ],
    ids=["llama in a ring", "gpt2 in a ring", "gemma2 by ulysses"],
)
def test_split_by_position_loss_and_gradients_are_those_of_one_device(tmp_path, kind, way):
    split = program(model=imported(tmp_path, kind), target="cpu:8", **way)
    assert_close(loss_and_gradients(split), loss_and_gradients(alone(split)))


SIZES = [5, 1, 7, 3]
TOKENS = np.random.default_rng(1).integers(0, 64, sum(SIZES)).astype(np.int32)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_documents_in_one_row_have_the_logits_of_each_alone(tmp_path, kind):
    opened = open_model(imported(tmp_path, kind))
    parameters = jax.jit(opened.initialise)(jax.random.key(0))

    def packed(parameters):
        with apart(jnp.repeat(jnp.arange(4), np.array(SIZES))[None]):
            return opened.forward(parameters, jnp.asarray(TOKENS[None]), None)[0][0]

    def separate(parameters):
        begins = np.cumsum([0, *SIZES])[:-1]
        rows = np.stack([np.roll(TOKENS, -begin) for begin in begins])
        each = opened.forward(parameters, jnp.asarray(rows), None)[0]
        return jnp.concatenate([row[:size] for row, size in zip(each, SIZES, strict=True)])

    got, want = jax.jit(lambda p: [packed(p), separate(p)])(parameters)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(want).max() > 0.05


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bloom", '"apart" takes a module with an argument position_ids .* BloomForCausalLM'),
        ("falcon", '"apart" takes attention that is plainly causal; .* has a mask'),
        ("gpt_neo", '"apart" takes attention of graphtrain, and GPTNeoForCausalLM computes its'),
    ],
)
def test_attention_of_its_own_keeps_no_documents_apart_and_says_so(tmp_path, kind, words):
    of = program(model=imported(tmp_path, kind), batch=APART)
    with pytest.raises(ImportedModelError, match=words):
        loaded(of, "evaluate")
