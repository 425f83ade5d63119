"""Models of text and images, beside eager transformers on the same images."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from image_text_folders import KINDS, folder_of
from image_text_models import batch_of, eager_inputs, module_of, opened_of, program_of
from programs import CUBE, loaded, placed_inputs
from safetensors.numpy import load_file

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Optimizer, Program, TorchModel
from graphtrain.config.serving_program import serving_program
from graphtrain.models.batch_images import with_images
from graphtrain.torch_frontend.parity import stack_weights, unstack_weights, weights
from graphtrain.weights.imported_folder import HuggingFaceWeights
from graphtrain.weights.published import SavedTensors
from graphtrain.weights.torch_modules import stored_buffers
from lowering.trees import flatten, unflatten
from sharding_rules.errors import ShardingError

ADAM = Optimizer(epsilon=1e-5, clip_norm=0.0, decay_mask="all", weight_decay=0.1)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def eager_loss(module: Any, of: Program, inputs: dict[str, np.ndarray]) -> torch.Tensor:
    logits = module(**eager_inputs(of, inputs), use_cache=False).logits
    targets = torch.tensor(inputs["targets"].reshape(-1)).long()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    counts = torch.tensor(inputs["weights"].reshape(-1))
    return (losses * counts).sum() / counts.sum()


def state_of(of: Program, module: Any) -> Any:
    tree = unflatten(stack_weights(opened_of(of), weights(module)))
    zeros = jax.tree.map(np.zeros_like, tree)
    moments = {"adam": {"count": np.int32(0), "mu": zeros, "nu": zeros}}
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    return {"parameters": tree, "optimizer": moments, "step": np.int32(0), "key": key}


def test_logits_are_those_of_transformers(kind, directory):
    of = program_of(kind, directory)
    module, inputs, opened = module_of(of), batch_of(of), opened_of(of)
    arrays = unflatten(stack_weights(opened, weights(module)))
    with torch.no_grad():
        expected = module(**eager_inputs(of, inputs), use_cache=False).logits.numpy()

    def logits(parameters: Any, tokens: jax.Array, images: jax.Array) -> jax.Array:
        with with_images(images):
            return opened.forward(parameters, tokens, None)[0]

    found = jax.jit(logits)(arrays, inputs["tokens"][0], inputs["images"][0])
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_split_over_devices_a_step_is_that_of_pytorchs_adamw(kind, directory):
    of = program_of(kind, directory, optimizer=ADAM, **CUBE)
    module, inputs = module_of(of), batch_of(of)
    optimizer = torch.optim.AdamW(
        module.parameters(), 1e-2, (ADAM.beta1, ADAM.beta2), ADAM.epsilon, ADAM.weight_decay
    )
    step = loaded(of, "train")
    state = placed_inputs(step, "state", state_of(of, module))
    out = step(state, placed_inputs(step, "batch", inputs), np.float32(1e-2))
    loss = eager_loss(module, of, inputs)
    loss.backward()
    optimizer.step()
    assert float(out["metrics"]["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    found = unstack_weights(opened_of(of), flatten(jax.device_get(out["state"]["parameters"])))
    for name, one in weights(module).items():
        np.testing.assert_allclose(found[name], one, atol=1e-4, err_msg=name)


def test_a_folders_weights_are_read_and_written_bit_for_bit(kind, directory):
    of = program_of(kind, directory)
    opened, folder = opened_of(of), folder_of(kind, directory)
    described = {path: SimpleNamespace(shape=spec.shape) for path, spec in opened.specs().items()}

    def fill(tree: Any, part: Any) -> Any:
        arrays = flatten(tree).items()
        return {
            path: part(path, one.shape, (slice(None),) * len(one.shape)) for path, one in arrays
        }

    assert isinstance(of.model, TorchModel)
    found = HuggingFaceWeights(folder, of.model).parameters(unflatten(described), fill)
    arrays = unstack_weights(opened, found) | stored_buffers(opened.meta)
    tensors = SavedTensors(opened.meta.module, {name: one.shape for name, one in arrays.items()})
    written = {}
    for name, array in arrays.items():
        written |= dict(tensors.add(name, array))
    expected = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)


def test_a_server_takes_no_images(directory):
    with pytest.raises(ShardingError, match=r"images = 2: generation, serving and evaluation"):
        serving_program(resolve(program_of("llava", directory)))
