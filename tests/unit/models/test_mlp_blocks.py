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
from graphtrain.cost_model.traffic import predict_collectives
from graphtrain.models.activations import ACTIVATIONS
from graphtrain.models.blocked_mlp import BlockedMLP
from graphtrain.models.mlp_block_count import mlp_block_count
from graphtrain.models.mlp_blocks import mlp_in_blocks
from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target

SEVEN = {"layers": 32, "embed": 4096, "heads": 32, "mlp": 11008, "vocab": 32000, "remat": "full"}
SEVENTY = SEVEN | {"layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672}
EMBED, MLP = 16, 32


def plain(names, activate, x, weights):
    hidden = [x @ weights[name] + weights.get(f"{name}_bias", 0.0) for name in names]
    return activate(*hidden) @ weights["down"]


@pytest.mark.parametrize(
    ("blocks", "shards"), [(2, 1), (16, 1), (8, 2)]
)  # of which the forward pass has 1, 4 and 2 blocks
@pytest.mark.parametrize("names", [("gate", "up"), ("up",)], ids=len)
@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])  # blocks in a row, and in a loop
def test_gradients_in_blocks_are_those_of_all_columns_at_once(blocks, shards, names, target):
    random = np.random.default_rng(0)
    shapes = {name: (EMBED, MLP) for name in names} | {"down": (MLP, EMBED)}
    shapes |= {f"{name}_bias": (MLP,) for name in names}
    weights = {  # of outputs near 1, whose sine does not magnify rounding
        name: random.normal(size=shape, scale=0.25).astype("float32")
        for name, shape in shapes.items()
    }
    x = random.normal(size=(2, 8, EMBED)).astype("float32")
    activate = ACTIVATIONS["swiglu" if len(names) == 2 else "gelu"]
    mlp = BlockedMLP(blocks, "mlp", names, activate, shards)
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


def test_tensor_parallelism_has_blocks_of_the_columns_of_a_device():
    rules = ("fsdp", "tensor", "sequence")
    assert count(mesh=Mesh(fsdp=32, tensor=2), rules=rules) == 4
    assert count(mesh=Mesh(fsdp=16, tensor=4), rules=rules) == 2
    assert count(mesh=Mesh(fsdp=16, tensor=4), rules=rules[:2]) == 2


def test_stages_that_do_not_divide_the_layers_have_one_block():
    """Their arrays have rows of zeros, which the model's shapes do not: no layout is made."""
    batch = Batch(global_batch_size=64, seq_len=4096, microbatches=4)
    mesh = Mesh(data=16, stage=4)
    assert count({"layers": 30}, mesh=mesh, rules=("data", "pipeline"), batch=batch) == 1


def test_gradients_that_shard_other_columns_than_activations_have_one_block(tmp_path):
    rules = tmp_path / "gradients.toml"
    rules.write_text('[optimizer]\nmlp = "fsdp"\n[activations]\nbatch = "fsdp"\n')
    assert count(rules=(str(rules),)) == 1


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


@pytest.mark.parametrize(
    ("target", "mesh", "model", "peak"),
    [
        ("v5p:4x4x4", Mesh(fsdp=16, tensor=4), SEVEN, 3_794_000_000),
        ("h100:512", Mesh(fsdp=64, tensor=8), SEVENTY, 3_252_000_000),
    ],
    ids=["7B", "70B"],
)
def test_estimates_with_tensor_parallelism_are_near_the_peaks_of_compilers(
    target, mesh, model, peak
):
    """The peaks are those of JAX 0.10.2 and libtpu 0.0.42.1."""
    rules, batch = ("data", "fsdp", "tensor", "sequence"), Batch(global_batch_size=64, seq_len=4096)
    made = resolved(model, target, mesh, rules, batch)
    assert memory(made).peak == pytest.approx(peak, rel=0.08)


@pytest.mark.parametrize(("target", "gathers"), [("h100:64", 7), ("v5p:4x4x4", 6)])
def test_estimated_traffic_has_the_second_gather_of_attentions_input(target, gathers):
    rules, batch = ("data", "fsdp", "tensor", "sequence"), Batch(global_batch_size=64, seq_len=4096)
    made = resolved({}, target, Mesh(fsdp=16, tensor=4), rules, batch)
    in_layers = [
        each
        for each in predict_collectives(made)
        if each.op == "all-gather" and each.axes == ("tensor",) and each.count >= SEVEN["layers"]
    ]
    assert sum(each.count for each in in_layers) == gathers * SEVEN["layers"]
