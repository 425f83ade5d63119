"""float16 with LoRA, with DPO, and for models of PyTorch and Flax: skipped steps, and the others.

A step that overflows is left out, and the next one has the loss and the gradient norm of float32.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch
from programs import LLAMA, batch, loaded, placed_inputs, program, state_of
from test_adapters import Base, frozen_of, new_state
from test_preferences import PREFERENCE, dpo_in_torch, in_torch, pairs
from test_torch_models import eager_loss, module_of
from test_torch_models import state_of as state_of_module
from torch_families import imported

from graphtrain.config.schema import Adapter, Batch, FlaxModel, Precision, Program
from graphtrain.models.flax_module import FlaxLanguageModel
from lowering.trees import Tree, flatten, unflatten

# The gradients of the first step overflow, and those of the second do not.
SCALING = Precision(initial_scale=2.0**40, backoff_factor=2.0**-30)
EXAMPLE = Path(__file__).parents[2] / "examples/bring-your-own/recurrence.py"
RATE = np.float32(1e-3)


def half(of: Program) -> Program:
    model = dataclasses.replace(of.model, dtype="float16")
    return dataclasses.replace(of, model=model, precision=SCALING)


def second_step(of: Program, state: Tree, inputs: Tree) -> dict[str, float]:
    """Metrics of the step after one that overflowed, which changed the scale alone."""
    of = half(of)
    step, metrics = loaded(of, "train"), []
    placed, made = placed_inputs(step, "batch", inputs), [state | initial_state(of)]
    for _ in range(2):
        given = [placed_inputs(step, "state", made[-1])]
        if of.adapter or of.loss.kind == "dpo":
            given.append(frozen_of(of, "train"))
        out = step(*given, placed, RATE)
        made.append(jax.device_get(out["state"]))
        metrics.append({name: float(value) for name, value in out["metrics"].items()})
    before, skipped, after = made
    assert not np.isfinite(metrics[0]["grad_norm"]) and metrics[0]["skipped_steps"] == 1
    assert (metrics[1]["loss_scale"], metrics[1]["skipped_steps"]) == (2.0**10, 1)
    for path, array in flatten(skipped["parameters"] | {"moments": skipped["optimizer"]}).items():
        was = flatten(before["parameters"] | {"moments": before["optimizer"]})[path]
        now = flatten(after["parameters"] | {"moments": after["optimizer"]})[path]
        assert np.array_equal(array, was), path
        assert not np.array_equal(array, now) or not array.any(), path
    return metrics[1]


def initial_state(of: Program) -> Tree:
    zero = np.int32(0)
    scale = np.float32(of.precision.initial_scale)
    return {"loss_scale": {"scale": scale, "good_steps": zero, "skipped_steps": zero}}


def same(metrics: dict[str, float], loss: float, norm: float) -> None:
    assert metrics["loss"] == pytest.approx(loss, rel=2e-3)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=2e-3)


def test_lora():
    of = program(
        model=dataclasses.replace(LLAMA, layers=1),
        adapter=Adapter(rank=4, alpha=8.0, base_dtype="nf4"),
    )
    state, inputs = new_state(of), batch(of)
    step = loaded(of, "train")
    given = placed_inputs(step, "state", state), frozen_of(of, "train")
    wide = step(*given, placed_inputs(step, "batch", inputs), RATE)["metrics"]
    same(second_step(of, state, inputs), float(wide["loss"]), float(wide["grad_norm"]))


def test_dpo():
    of = program(loss=PREFERENCE)
    inputs, base = pairs(of), Base(LLAMA).arrays
    state = new_state(of)
    drawn = flatten(state["parameters"])
    trained = {path: base[path] + array for path, array in drawn.items()}
    policy = in_torch(trained)
    loss, margins = dpo_in_torch(policy, in_torch(base), inputs)
    loss.backward()
    norm = torch.sqrt(sum((each.grad**2).sum() for each in policy.parameters()))
    metrics = second_step(of, state | {"parameters": unflatten(trained)}, inputs)
    same(metrics, float(loss.detach()), float(norm))
    assert metrics["margin"] == pytest.approx(np.mean(margins), abs=3e-3)  # differences of log p


@pytest.mark.parametrize("front_end", ["trace", "strict"])
def test_a_model_of_pytorch(tmp_path, front_end):
    of = program(model=imported(tmp_path, "llama", front_end=front_end))
    module, inputs = module_of(of), batch(of)
    loss = eager_loss(module, inputs)
    loss.backward()
    norm = torch.sqrt(sum((each.grad**2).sum() for each in module.parameters()))
    same(second_step(of, state_of_module(of, module), inputs), loss.item(), norm.item())


def test_a_flax_module_of_ones_own():
    arguments = {"embed": 16, "mlp": 32, "blocks": 1}
    model = FlaxModel(flax=f"{EXAMPLE}:Recurrence", arguments=arguments, vocab=24, dtype="float32")
    of = program(model=model, batch=Batch(global_batch_size=8, seq_len=4))
    state, inputs = state_of(of), batch(of)

    def loss_of(parameters: Tree) -> jax.Array:
        logits, _ = FlaxLanguageModel(model).forward(parameters, inputs["tokens"][0])
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            logits, inputs["targets"][0]
        )
        return (losses * inputs["weights"][0]).sum() / inputs["weights"].sum()

    loss, gradients = jax.value_and_grad(loss_of)(state["parameters"])
    same(second_step(of, state, inputs), float(loss), float(optax.tree.norm(gradients)))
