"""Gradients of an MLP's weights, computed before the gradient of its input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Adapter,
    Batch,
    FlaxModel,
    Mesh,
    MixtureOfExperts,
    Model,
    Precision,
    Program,
)
from graphtrain.models.matmul import dot_many
from graphtrain.models.mlp_block_count import mlp_block_count
from graphtrain.models.mlp_gradients import multiply_weights_first
from graphtrain.models.mlp_support import computes_weights_first

MODEL = {"layers": 8, "embed": 1024, "heads": 16, "mlp": 2816, "vocab": 32_000, "remat": "dots"}
DOWN, UP = ("bsm,me->bse", (6, 4)), ("bse,em->bsm", (4, 6))


@pytest.mark.parametrize(("equation", "shape"), [DOWN, UP])
@pytest.mark.parametrize("count", [1, 2])
def test_products_and_gradients_are_those_of_plain_products(equation, shape, count):
    random = np.random.default_rng(0)
    x = jnp.float32(random.normal(size=(2, 3, shape[0])))
    weights = [jnp.float32(random.normal(size=shape)) for _ in range(count)]

    def total(multiply, x, weights):
        return sum(jnp.sin(product).sum() for product in multiply(equation, x, weights))

    first, plain = (
        jax.value_and_grad(partial(total, multiply), (0, 1))
        for multiply in (partial(multiply_weights_first, "mlp"), dot_many)
    )
    assert "optimization_barrier" in str(jax.make_jaxpr(first)(x, weights))
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
        first(x, weights),
        plain(x, weights),
    )


def is_first(model=None, target="h100:8", mesh=None, rules=("fsdp",), **settings):
    batch = Batch(global_batch_size=32, seq_len=2048)
    program = Program(
        target=target,
        mesh=mesh or Mesh(fsdp=8),
        rules=rules,
        model=Model(**MODEL | (model or {})),
        **{"batch": batch} | settings,
    )
    return computes_weights_first(resolve(program))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target": "v5e:2x4"},
        {"model": {"remat": "none"}},
        {"mesh": Mesh(data=8), "rules": ("zero2",)},
        {"mesh": Mesh(fsdp=4, context=2), "rules": ("fsdp", "context")},
    ],
    ids=str,
)
def test_weights_are_first_where_hidden_values_are_larger_than_their_gradients(changes):
    assert is_first(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"remat": "full"}},  # blocks
        {"batch": Batch(global_batch_size=8, seq_len=2048)},  # 2 x 2,048 bytes, as 4 x 1,024
        {"target": "cpu:8"},
        {"model": {"moe": MixtureOfExperts(experts=4)}},
        {"model": {"fused_gate_up": True}},
        {"mesh": Mesh(fsdp=4, tensor=2), "rules": ("fsdp", "tensor")},
        {
            "mesh": Mesh(fsdp=4, stage=2),
            "rules": ("fsdp", "pipeline"),
            "batch": Batch(global_batch_size=64, seq_len=2048, microbatches=2),
        },
        {"adapter": Adapter(rank=8, alpha=16.0)},
        {"precision": Precision(compute="fp8")},
    ],
    ids=str,
)
def test_other_mlps_have_the_order_of_the_compiler(changes):
    assert not is_first(**changes)


@pytest.mark.parametrize("target", ["cpu:8", "h100:8"])
def test_an_imported_model_has_its_own_mlps(target):
    program = Program(
        target=target,
        mesh=Mesh(fsdp=8),
        rules=("fsdp",),
        model=FlaxModel(flax="mine.py:M", vocab=8),
        batch=Batch(global_batch_size=32, seq_len=2048),
    )
    assert mlp_block_count(resolve(program)) == 1
    assert not computes_weights_first(resolve(program))
