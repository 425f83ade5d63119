from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Adapter,
    Batch,
    Loss,
    Mesh,
    MixtureOfExperts,
    Model,
    Precision,
    Program,
)
from graphtrain.cost_model.memory import largest, memory
from graphtrain.models.activations import ACTIVATIONS
from graphtrain.models.mlp_block_count import mlp_block_count
from graphtrain.models.mlp_blocks import BlockedMLP, mlp_in_blocks
from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target

SEVEN = {"layers": 32, "embed": 4096, "heads": 32, "mlp": 11008, "vocab": 32000, "remat": "full"}
EMBED, MLP = 16, 32


def plain(names, activate, x, weights):
    hidden = [x @ weights[name] + weights.get(f"{name}_bias", 0.0) for name in names]
    return activate(*hidden) @ weights["down"]


@pytest.mark.parametrize("blocks", [2, 16])  # of which the forward pass has 1 and 4
@pytest.mark.parametrize("names", [("gate", "up"), ("up",)], ids=len)
@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])  # blocks in a row, and in a loop
def test_gradients_in_blocks_are_those_of_all_columns_at_once(blocks, names, target):
    random = np.random.default_rng(0)
    shapes = {name: (EMBED, MLP) for name in names} | {"down": (MLP, EMBED)}
    shapes |= {f"{name}_bias": (MLP,) for name in names}
    weights = {  # of outputs near 1, whose sine does not magnify rounding
        name: random.normal(size=shape, scale=0.25).astype("float32")
        for name, shape in shapes.items()
    }
    x = random.normal(size=(2, 8, EMBED)).astype("float32")
    activate = ACTIVATIONS["swiglu" if len(names) == 2 else "gelu"]
    mlp = BlockedMLP(blocks, "mlp", names, activate)
    with trace_for_target(Target.parse(target)):
        got, want = (
            jax.jit(jax.value_and_grad(lambda x, w, f=f: jnp.sin(f(x, w)).sum(), (0, 1)))(
                x, weights
            )
            for f in (partial(mlp_in_blocks, mlp), partial(plain, names, activate))
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-5), got, want)


def resolved(model=None, target="h100:64", mesh=None, rules=("fsdp",), batch=None, **settings):
    of = Program(
        target=target,
        mesh=mesh or Mesh(fsdp=64),
        rules=rules,
        model=Model(**SEVEN | (model or {})),
        batch=batch or Batch(global_batch_size=128, seq_len=4096),
        **settings,
    )
    return resolve(of)


def count(*arguments, **settings):
    return mlp_block_count(resolved(*arguments, **settings))


def test_wide_mlps_that_are_recomputed_have_as_many_blocks_as_are_wide():
    assert count() == 8
    assert count({"mlp": 5632}) == 4
    assert count({"mlp": 28672}) == 16
    assert count(target="v5p:4x4x4") == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"mlp_blocks": "none"}},
        {"model": {"remat": "dots"}},
        {"model": {"fused_gate_up": True}},
        {"target": "cpu:64"},
        {"batch": Batch(global_batch_size=64, seq_len=512)},  # saves too little
        {"model": {"post_norm": True}},
        {"model": {"moe": MixtureOfExperts(experts=4)}},
        {"mesh": Mesh(fsdp=32, tensor=2), "rules": ("fsdp", "tensor")},
        {
            "mesh": Mesh(fsdp=32, stage=2),
            "rules": ("fsdp", "pipeline"),
            "batch": Batch(global_batch_size=512, seq_len=4096, microbatches=4),
        },
        {
            "batch": Batch(
                global_batch_size=256, seq_len=4096, microbatches=2, gradient_reduction="per_step"
            )
        },
        {"adapter": Adapter(rank=8, alpha=16.0)},
        {"precision": Precision(compute="fp8")},
    ],
    ids=str,
)
def test_other_mlps_have_one_block(changes):
    assert count(**changes) == 1


@pytest.mark.parametrize("blocks", ["auto", "none"])
def test_the_largest_arrays_are_parts_of_the_estimated_memory(blocks):
    made = resolved({"mlp_blocks": blocks}, loss=Loss(chunk=512))
    named, temporaries = largest(made, count=100), memory(made).temporaries
    assert any("in 8 blocks" in name for name in named) == (blocks == "auto")
    of_layer = [size for name, size in named.items() if name.startswith(("one layer", "gathered"))]
    assert 0.9 * temporaries < sum(of_layer) <= temporaries + 1
    assert named["logits and their gradient"] <= temporaries
