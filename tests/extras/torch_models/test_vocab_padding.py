"""Rows that pad the vocabulary of an imported model change neither loss nor gradients."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError

from graphtrain.config.schema import TorchModel
from graphtrain.models.loss import cross_entropy
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import UNOPTIMIZED, stack_weights, weights
from graphtrain.weights.imported_folder import HuggingFaceWeights
from lowering.trees import flatten, unflatten

TOKENS, PADDING = 37, 3
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": TOKENS}
BATCH = np.random.default_rng(0).integers(0, TOKENS, (2, 9), np.int32)


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request, tmp_path_factory) -> TorchModel:
    """The settings of a Llama with padding, whose folder has weights."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = transformers.LlamaConfig(
        **SIZES, num_attention_heads=2, tie_word_embeddings=request.param == "tied"
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(settings).save_pretrained(folder)
    return TorchModel(hf=str(folder), vocab_padding=PADDING, dtype="float32", remat="none")


def read(model: TorchModel) -> dict[str, np.ndarray]:
    """Read the weights of the folder in two parts, as two devices would."""
    specs = open_model(model).specs()

    def halves(part, path, shape):
        middle, rest = (shape[0] + 1) // 2, tuple(map(slice, shape[1:]))
        slices = slice(middle), slice(middle, shape[0])
        return np.concatenate([part(path, shape, (one, *rest)) for one in slices])

    def fill(tree, part):
        return unflatten(
            {path: halves(part, path, one.shape) for path, one in flatten(tree).items()}
        )

    described = {path: SimpleNamespace(shape=spec.shape) for path, spec in specs.items()}
    folder = HuggingFaceWeights(Path(str(model.hf)), model)
    return flatten(folder.parameters(unflatten(described), fill))


def loss_and_gradients(model: TorchModel, arrays: dict[str, np.ndarray]):
    opened = open_model(model)

    def loss(arrays):
        logits, _ = opened.forward(unflatten(arrays), jnp.asarray(BATCH[:, :-1]), None)
        return cross_entropy(logits, jnp.asarray(BATCH[:, 1:]), jnp.ones((2, 8)))[0], logits

    step = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(arrays).compile(UNOPTIMIZED)
    return jax.device_get(step(arrays))


def cut(model: TorchModel, arrays):
    """Remove the rows that pad the vocabulary."""
    axes = {path: spec.axes for path, spec in open_model(model).specs().items()}
    return {
        path: array[tuple(slice(TOKENS) if one == "vocab" else slice(None) for one in axes[path])]
        for path, array in arrays.items()
    }


def test_loss_and_gradients_are_those_without_padding(model):
    tied = '"tie_word_embeddings": true' in Path(f"{model.hf}/config.json").read_text()
    padded = replace(model, front_end="auto" if tied else "strict")
    unpadded = padded.without_padding()
    assert (padded.vocab, padded.vocab_tokens, unpadded.vocab) == (40, TOKENS, TOKENS)
    arrays = read(padded)
    plain = stack_weights(
        open_model(unpadded), weights(transformers.LlamaForCausalLM.from_pretrained(str(model.hf)))
    )
    for path, array in cut(padded, arrays).items():
        np.testing.assert_array_equal(array, plain[path], err_msg=path)
    for path, array in arrays.items():  # whatever the padding contains
        array[plain[path].shape[0] :] += 1

    (found, logits), gradients = loss_and_gradients(padded, arrays)
    (wanted, expected_logits), expected = loss_and_gradients(unpadded, plain)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(logits[..., :TOKENS], expected_logits, rtol=1e-6, atol=1e-6)
    assert not jax.nn.softmax(logits)[..., TOKENS:].any()
    for path, gradient in cut(padded, gradients).items():
        largest = np.abs(expected[path]).max()
        np.testing.assert_allclose(gradient, expected[path], rtol=0, atol=1e-6 * largest)
        assert np.count_nonzero(gradients[path]) == np.count_nonzero(gradient), path


def test_settings_that_contradict_config_json_are_refused(model):
    assert replace(model, vocab=40).vocab == 40
    with pytest.raises(ValidationError, match=r"vocab = 41 is not vocab_size = 37 .* set it to 40"):
        TorchModel(hf=model.hf, vocab=41, vocab_padding=3)
    with pytest.raises(ValidationError, match="vocab_padding needs hf"):
        TorchModel(torch="a:b", vocab=41, vocab_padding=3)
