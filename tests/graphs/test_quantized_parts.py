"""Recipes of fp8 and int8, and the parts of a model beside its layers: head, experts, LoRA."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from programs import LLAMA, batch, loaded, lower, placed_inputs, program, state_of
from test_adapters import Base, frozen_of, new_state
from test_preferences import PREFERENCE, pairs
from test_torch_models import eager_loss, module_of
from test_torch_models import state_of as state_of_module
from torch_families import imported

from graphtrain.config.schema import (
    Adapter,
    Batch,
    Loss,
    MixtureOfExperts,
    Model,
    Precision,
    Program,
)
from graphtrain.models.quantized_matmul import quantized_dot
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import unstack_weights
from lowering.trees import flatten, unflatten

MODEL = Model(layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=64, remat="none")
EXPERTS = dataclasses.replace(MODEL, moe=MixtureOfExperts(experts=4, capacity_factor=2.0))
SMALL = Batch(global_batch_size=4, seq_len=16)
ALL = Precision(compute="fp8", exclude=())
NAMED = Precision(compute="fp8", exclude=("up", "router"))
DTYPES = {"fp8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2), "int8": (np.int8, np.int8)}


def quantized(array: np.ndarray, dtype: Any, axis: int) -> np.ndarray:
    """The values that remain of an array, with a scale for 128 values along an axis."""
    moved = np.moveaxis(array, axis, -1).astype(np.float64)
    blocks = moved.reshape(*moved.shape[:-1], -1, 128)
    limit = 127.5 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)
    scale = np.abs(blocks).max(-1, keepdims=True) / limit
    values = blocks / scale
    values = (
        np.round(values).clip(-127, 127)
        if dtype == np.int8
        else values.astype(np.float32).astype(dtype)
    )
    return np.moveaxis((values.astype(np.float64) * scale).reshape(moved.shape), -1, axis)


@pytest.mark.parametrize("compute", DTYPES)
def test_a_block_is_128_summed_values_of_a_row_or_column_forward_and_backward(compute: Any):
    values, gradients = DTYPES[compute]
    precision = Precision(compute=compute, recipe="block")
    random = np.random.default_rng(0)
    # Blocks of very different sizes: one scale for a row would round the smaller ones to zero.
    sizes = np.repeat([1.0, 1e-3], 128)
    x, weights, gradient = (random.normal(size=(256, 256)) * sizes for _ in range(3))
    if compute == "int8":  # the code of the smallest number is -127 or -128, by one rounding
        x, weights, gradient = np.abs(x), np.abs(weights), np.abs(gradient)
    x, weights, gradient = (array.astype(np.float32) for array in (x, weights, gradient))
    out, backward = jax.vjp(
        lambda x, w: quantized_dot(precision, "re,em->rm", x, w, jnp.float32), x, weights.T
    )
    of_x, of_weights = backward(gradient)
    q = quantized
    np.testing.assert_allclose(out, q(x, values, 1) @ q(weights.T, values, 0), rtol=1e-5, atol=1e-4)
    wanted = q(gradient, gradients, 1) @ q(weights.T, values, 1).T
    np.testing.assert_allclose(of_x, wanted, rtol=1e-5, atol=1e-4)
    wanted = q(x, values, 0).T @ q(gradient, gradients, 0)
    np.testing.assert_allclose(of_weights, wanted, rtol=1e-5, atol=1e-4)


def products(of: Program) -> int:
    text = lower(of, "gradients").text
    return sum("dot_general" in line and "f8E" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 7),
        ({"precision": ALL}, 8),
        ({"precision": ALL, "loss": Loss(chunk=8)}, 8),
        ({"model": EXPERTS}, 4),  # attention alone
        ({"model": EXPERTS, "precision": ALL}, 4 + 3 + 2),  # experts; router and head
        ({"model": EXPERTS, "precision": NAMED}, 7),
        ({"adapter": Adapter(rank=4, alpha=8.0, target_modules=("up", "query"))}, None),
    ],
    ids=["layers", "head", "chunks of the head", "attention", "experts", "names", "LoRA"],
)
def test_what_exclude_does_not_name_is_in_8_bits_forward_and_backward(settings, count):
    fp8 = Precision(compute="fp8")
    of = program(**{"model": MODEL, "batch": SMALL, "precision": fp8} | settings)
    # A frozen weight has no gradient, so LoRA leaves two products; that of x is not needed where
    # x does not depend on a trained weight: query, key and value of the first layer are in a loop.
    assert products(of) == (2 * 7 if count is None else 3 * count)


def gradients(of: Program) -> np.ndarray:
    state = new_state(of) if of.adapter else state_of(of)
    executable = loaded(of, "gradients")
    frozen = [frozen_of(of, "gradients")] if of.adapter else []
    given = [placed_inputs(executable, "state", state), *frozen]
    out = jax.device_get(executable(*given, placed_inputs(executable, "batch", batch(of))))
    return np.concatenate([g.ravel() for g in flatten(out["gradients"]).values()])


@pytest.mark.parametrize(
    "settings",
    [
        {"model": EXPERTS, "loss": Loss(chunk=8), "exclude": ("router",)},
        {"adapter": Adapter(rank=4, alpha=8.0), "exclude": ()},
    ],
    ids=["experts and chunks of the head", "LoRA"],
)
def test_gradients_of_all_parts_point_where_those_of_float32_do(settings):
    settings = {"model": MODEL, "batch": SMALL} | settings
    exclude = settings.pop("exclude")
    of = program(**settings)
    of = dataclasses.replace(of, model=dataclasses.replace(of.model, layers=1, dtype="float32"))
    # The rest of the program in fp8 is in bfloat16.
    fp8 = Precision(compute="fp8", exclude=exclude)
    reference, found = gradients(of), gradients(dataclasses.replace(of, precision=fp8))
    assert not np.array_equal(reference, found)
    cosine = reference @ found / np.linalg.norm(reference) / np.linalg.norm(found)
    assert cosine > 0.99


@pytest.mark.parametrize("compute", DTYPES)
def test_dpo_quantizes_the_policy_and_its_reference_alike(compute: Any):
    """Equal weights have no margin, exactly; others have the gradients of float32."""
    of = program(loss=PREFERENCE, model=dataclasses.replace(LLAMA, layers=1))
    quantized_of = dataclasses.replace(of, precision=Precision(compute=compute, exclude=()))
    assert products(quantized_of) == (3 * 8 + 8 if compute == "fp8" else 0)
    base, inputs = unflatten(Base(of.model).arrays), pairs(of)

    def step(of: Program, parameters: Any) -> tuple[Any, np.ndarray]:
        executable = loaded(of, "gradients")
        state = placed_inputs(executable, "state", new_state(of) | {"parameters": parameters})
        placed = placed_inputs(executable, "batch", inputs)
        out = jax.device_get(executable(state, frozen_of(of, "gradients"), placed))
        return out, np.concatenate([g.ravel() for g in flatten(out.pop("gradients")).values()])

    same, _ = step(quantized_of, base)
    assert same["margin"] == 0.0 and same["loss"] == pytest.approx(np.log(2), rel=1e-6)
    random = np.random.default_rng(1)
    moved = jax.tree.map(
        lambda array: array + random.normal(0, 0.05, array.shape).astype(np.float32), base
    )
    wanted, reference = step(of, moved)
    found, gradient = step(quantized_of, moved)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
    cosine = reference @ gradient / np.linalg.norm(reference) / np.linalg.norm(gradient)
    assert 0.98 < cosine < 1 - 1e-6


@pytest.mark.parametrize(
    ("kind", "exclude", "count"),
    [
        ("llama", None, 7),
        ("llama", ("down", "experts"), 7 - 1 + 1),  # without down, with the head
        ("mixtral", None, 4),  # attention alone: neither experts nor the router
        ("mixtral", ("head", "experts"), 5),
    ],
)
def test_products_of_an_imported_model_are_in_8_bits_by_the_names_of_its_modules(
    tmp_path, kind, exclude, count
):
    precision = Precision(compute="fp8", exclude=exclude)
    of = program(model=imported(tmp_path, kind), batch=SMALL, precision=precision)
    assert products(of) == 3 * count


def test_an_imported_model_in_8_bits_has_the_loss_and_gradients_of_pytorch(tmp_path):
    fp8 = Precision(compute="fp8", exclude=("experts",))
    of = program(model=imported(tmp_path, "llama"), batch=SMALL, precision=fp8)
    module, inputs = module_of(of), batch(of)
    loss = eager_loss(module, inputs)
    loss.backward()
    step = loaded(of, "gradients")
    state = placed_inputs(step, "state", state_of_module(of, module))
    found = jax.device_get(step(state, placed_inputs(step, "batch", inputs)))
    assert float(found["loss"]) == pytest.approx(loss.item(), rel=1e-2)
    assert float(found["loss"]) != pytest.approx(loss.item(), rel=1e-6)
    ours = unstack_weights(open_model(of.model), flatten(found["gradients"]))
    theirs = {name: one.grad.numpy() for name, one in module.named_parameters()}
    a, b = (np.concatenate([each[name].ravel() for name in theirs]) for each in (ours, theirs))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99


def test_the_strict_front_end_is_refused(tmp_path):
    fp8 = Precision(compute="fp8")
    with pytest.raises(ValueError, match=r'cannot be used with model\.front_end = "strict"'):
        program(model=imported(tmp_path, "llama", front_end="strict"), precision=fp8)
