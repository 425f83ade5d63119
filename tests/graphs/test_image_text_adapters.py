"""Adapters of models of text and images, beside peft on the same images."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
from image_text_folders import KINDS
from image_text_models import batch_of, eager_inputs, module_of, opened_of, program_of
from peft.tuners.lora.layer import LoraLayer
from programs import loaded, placed_inputs

from graphtrain.config.schema import Adapter, Mesh, Optimizer, Program
from graphtrain.torch_frontend.adapters import lora_orders
from graphtrain.torch_frontend.parity import stack_weights, weights
from lowering.trees import flatten, unflatten
from sharding_rules.errors import ShardingError

# Of peft and transformers to each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

ADAM = Optimizer(epsilon=1e-5, clip_norm=0.0, decay_mask="all", weight_decay=0.1)
RATE, STEPS = 1e-2, 3
ADAPTER = Adapter(rank=3, alpha=6.0)  # all linear layers


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def adapted(module: Any, targets: Any = "all-linear") -> Any:
    """The module with factors of peft, none of them zero."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=ADAPTER.rank, lora_alpha=int(ADAPTER.alpha), target_modules=targets)
    model = peft.get_peft_model(module, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    return model


def layers_of(model: Any) -> dict[str, Any]:
    """The linear layers that peft adapts, by the name of their weight."""
    return {
        f"{name.removeprefix('base_model.model.')}.weight": layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }


def factors_of(
    of: Program, model: Any, value: Callable[[Any], Any] = lambda one: one
) -> dict[str, np.ndarray]:
    """The factors of peft, or arrays of theirs, as a program stores them."""
    layers, found = layers_of(model), {}
    names = opened_of(of).parameter_names_by_path()
    for path in lora_orders(opened_of(of), ADAPTER):
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            rows = [value(getattr(layers[name], theirs)["default"].weight) for name in names[path]]
            arrays = [row.detach().numpy().copy() for row in rows]
            is_stacked = opened_of(of).is_stacked(path)
            found[f"{path}/{ours}"] = np.stack(arrays) if is_stacked else arrays[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_an_adapter_are_those_of_peft(kind, directory):
    of = program_of(
        kind, directory, adapter=ADAPTER, optimizer=ADAM, target="cpu:2", mesh=Mesh(fsdp=2)
    )
    base = stack_weights(opened_of(of), weights(module := module_of(of)))
    model, inputs = adapted(module), batch_of(of)
    optimizer = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad],
        RATE,
        (ADAM.beta1, ADAM.beta2),
        ADAM.epsilon,
        ADAM.weight_decay,
    )
    step, trained = loaded(of, "train"), unflatten(factors_of(of, model))
    zeros = jax.tree.map(np.zeros_like, trained)
    state = {
        "parameters": trained,
        "optimizer": {"adam": {"count": np.int32(0), "mu": zeros, "nu": zeros}},
        "step": np.int32(0),
        "key": np.asarray(jax.random.key_data(jax.random.key(0))),
    }
    frozen = placed_inputs(step, "frozen", unflatten(base))
    for _ in range(STEPS):
        placed = placed_inputs(step, "state", state)
        out = step(placed, frozen, placed_inputs(step, "batch", inputs), np.float32(RATE))
        optimizer.zero_grad()
        logits = model(**eager_inputs(of, inputs), use_cache=False).logits
        targets = torch.tensor(inputs["targets"].reshape(-1)).long()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        counts = torch.tensor(inputs["weights"].reshape(-1))
        loss = (losses * counts).sum() / counts.sum()
        loss.backward()
        optimizer.step()
        assert float(out["metrics"]["loss"]) == pytest.approx(loss.item(), rel=1e-5)
        state = jax.device_get(out["state"])
    found, expected = flatten(state["parameters"]), factors_of(of, model)
    assert found.keys() == expected.keys()
    moments = flatten(state["optimizer"]["adam"]["mu"])
    for path, array in factors_of(of, model, lambda one: optimizer.state[one]["exp_avg"]).items():
        largest = np.abs(array).max()  # AdamW's steps do not show the scale of gradients
        np.testing.assert_allclose(moments[path], array, atol=1e-3 * largest, err_msg=path)
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, atol=1e-4, err_msg=path)


def assert_same_layers(of: Program, adapter: Adapter, targets: Any) -> None:
    """Of layers that get a gradient; peft also adapts blocks that nothing reads."""
    opened = opened_of(of)
    names = opened.parameter_names_by_path()
    ours = {name for path in lora_orders(opened, adapter) for name in names[path]}
    idle = {name for path in opened.untrained for name in names[path]}
    assert ours == layers_of(adapted(module_of(of), targets)).keys() - idle


@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_an_adapter_are_those_of_peft(kind, directory):
    of = program_of(kind, directory)
    assert_same_layers(of, ADAPTER, "all-linear")
    own = {"llava": ["linear_1", "fc1"], "qwen2_5_vl": ["qkv", "attn.proj", "mlp.0"]}[kind]
    for targets in (["q_proj"], ["gate_proj", "o_proj"], own):
        paths = tuple(target.replace(".", "/") for target in targets)
        assert_same_layers(of, replace(ADAPTER, target_modules=paths), targets)


def test_names_that_peft_would_match_with_convolutions_are_refused(directory):
    cases = {
        ("qwen2_5_vl", "proj"): r"'proj' also names model/visual/patch_embed/proj, a Conv3d,",
        ("llava", "patch_embedding"): r"also names .*embeddings/patch_embedding, a Conv2d,",
    }
    for (kind, name), words in cases.items():
        opened = opened_of(program_of(kind, directory))
        with pytest.raises(ShardingError, match=words):
            lora_orders(opened, replace(ADAPTER, target_modules=(name,)))
    of_tower = replace(ADAPTER, target_modules=("visual/*",))
    assert len(lora_orders(opened_of(program_of("qwen2_5_vl", directory)), of_tower)) == 12
