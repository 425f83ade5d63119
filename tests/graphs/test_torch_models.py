"""Models of transformers as they are, split over 8 devices, beside eager PyTorch."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from programs import CUBE, batch, loaded, placed_inputs, program
from torch_families import FAMILIES, MORE, imported

from graphtrain.config.schema import Batch, Optimizer, Program
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    module_with_weights,
    stack_weights,
    unstack_weights,
)
from lowering.trees import flatten, unflatten

ADAM = Optimizer(epsilon=1e-5, clip_norm=0.0, decay_mask="all", weight_decay=0.1)


def of_family(folder: Path, kind: str, **settings: Any) -> Program:
    return program(
        **CUBE
        | {"model": imported(folder, kind), "batch": Batch(global_batch_size=8, seq_len=12)}
        | settings
    )


def module_of(of: Program) -> torch.nn.Module:
    return module_with_weights(of.model)


def eager_loss(module: torch.nn.Module, inputs: dict[str, np.ndarray]) -> torch.Tensor:
    """Over the targets that count, of all microbatches."""
    flat = {name: torch.tensor(x.reshape(-1, x.shape[-1])) for name, x in inputs.items()}
    logits = module(input_ids=flat["tokens"].long(), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), flat["targets"].long().reshape(-1), reduction="none"
    )
    return (losses * flat["weights"].reshape(-1)).sum() / flat["weights"].sum()


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: one.detach().numpy().copy() for name, one in module.named_parameters()}


def state_of(of: Program, module: torch.nn.Module) -> Any:
    """A state with the module's weights."""
    tree = unflatten(stack_weights(open_model(of.model), weights(module)))
    zeros = jax.tree.map(np.zeros_like, tree)
    moments = {"adam": {"count": np.int32(0), "mu": zeros, "nu": zeros}}
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    return {"parameters": tree, "optimizer": moments, "step": np.int32(0), "key": key}


@pytest.mark.parametrize(
    ("kind", "front_end"),
    [
        *((kind, "trace") for kind in FAMILIES),
        ("llama", "strict"),
        *((kind, "trace") for kind in MORE),
        *((kind, "strict") for kind in (*FAMILIES, *MORE) if kind != "llama"),
    ],
)
def test_split_over_devices_a_family_has_the_loss_and_gradients_of_pytorch(
    tmp_path, kind, front_end
):
    of = of_family(
        tmp_path,
        kind,
        model=imported(tmp_path, kind, front_end=front_end),
        batch=Batch(global_batch_size=8, seq_len=12, microbatches=2 if kind == "llama" else 1),
    )
    module, inputs = module_of(of), batch(of)
    eager = eager_loss(module, inputs)
    eager.backward()
    expected = {
        name: np.zeros(one.shape) if one.grad is None else one.grad.numpy()
        for name, one in module.named_parameters()
    }

    step = loaded(of, "gradients")
    got = step(
        placed_inputs(step, "state", state_of(of, module)), placed_inputs(step, "batch", inputs)
    )

    assert abs(float(got["loss"]) - eager.item()) < LOSS_TOLERANCE * abs(eager.item())
    found = unstack_weights(open_model(of.model), flatten(jax.device_get(got["gradients"])))
    largest = max(np.abs(one).max() for one in expected.values())
    for name, one in expected.items():
        np.testing.assert_allclose(
            found[name],
            one,
            atol=GRADIENT_TOLERANCE * max(np.abs(one).max(), 1e-3 * largest),
            err_msg=name,
        )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_five_steps_are_those_of_pytorchs_adamw(tmp_path, kind):
    of = of_family(tmp_path, kind, optimizer=ADAM, rules=("data", "zero1", "fsdp", "tensor"))
    module = module_of(of)
    optimizer = torch.optim.AdamW(
        module.parameters(), 1e-3, (ADAM.beta1, ADAM.beta2), ADAM.epsilon, ADAM.weight_decay
    )
    step = loaded(of, "train")
    state = placed_inputs(step, "state", state_of(of, module))
    for seed in range(5):
        inputs = batch(of, seed)
        out = step(state, placed_inputs(step, "batch", inputs), np.float32(1e-3))
        state = out["state"]
        optimizer.zero_grad()
        loss = eager_loss(module, inputs)
        loss.backward()
        optimizer.step()
        assert float(out["metrics"]["loss"]) == pytest.approx(loss.item(), rel=1e-4)
    found = unstack_weights(open_model(of.model), flatten(jax.device_get(state["parameters"])))
    for name, one in weights(module).items():
        np.testing.assert_allclose(found[name], one, atol=1e-4, err_msg=name)
