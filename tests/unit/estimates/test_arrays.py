"""Arrays by arithmetic are those that the model makes."""

from dataclasses import replace

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Batch,
    LatentAttention,
    Mesh,
    MixtureOfExperts,
    Model,
    Optimizer,
    Program,
)
from graphtrain.cost_model.weights import shard_weights
from graphtrain.graphs.build import state_specs_of
from graphtrain.models.decoder import parameter_specs
from graphtrain.models.flops import parameter_count
from graphtrain.models.shapes import parameter_arrays, state_arrays
from lowering.trees import flatten
from sharding_rules.plan import make_plan

SIZES = {"layers": 5, "embed": 32, "heads": 4, "mlp": 48, "vocab": 64}
LATENT = LatentAttention(kv_lora_rank=16, q_lora_rank=20, qk_rope_head_dim=4, v_head_dim=6)
MODELS = {
    "llama": {"kv_heads": 2},
    "gpt2": {
        "positions": "learned",
        "max_position_embeddings": 16,
        "norm": "layer",
        "activation": "gelu",
        "bias": "all",
        "tie_word_embeddings": True,
    },
    "alibi": {"bias": "qkv", "positions": "alibi", "activation": "geglu"},
    "merged gate": {"fused_gate_up": True, "bias": "all"},
    "gated with all biases": {"bias": "all", "norm": "layer"},
    "bloom": {"bias": "all", "norm": "layer", "embedding_norm": True},
    "gemma": {"qk_norm": True, "post_norm": True, "head_dim": 16},
    "internlm": {"bias": "attention"},
    "mixtral": {"moe": MixtureOfExperts(experts=4)},
    "gpt-oss": {"attention_sinks": True, "moe": MixtureOfExperts(experts=4, expert_bias=True)},
    "glm4 mixture": {
        "moe": MixtureOfExperts(
            experts=4,
            bias_update_rate=0.001,
            shared_expert_mlp=24,
            shared_expert_gate=False,
            dense_layers=2,
            dense_mlp=40,
        )
    },
    "latents": {"head_dim": 12, "latent_attention": LATENT, "attention_sinks": True},
    "latents of keys alone": {
        "head_dim": 12,
        "latent_attention": replace(LATENT, q_lora_rank=None),
        "norm": "layer",
    },
    "further tokens": {
        "head_dim": 12,
        "latent_attention": LATENT,
        "mtp_loss_weight": 0.3,
        "moe": MixtureOfExperts(experts=4, bias_update_rate=0.0, dense_layers=1, dense_mlp=40),
    },
    "further tokens without a mixture": {"bias": "all", "norm": "layer", "mtp_loss_weight": 0.3},
    "qwen2 mixture": {"moe": MixtureOfExperts(experts=4, shared_expert_mlp=24)},
}


@pytest.mark.parametrize("name", MODELS)
def test_arrays_are_those_of_the_model(name):
    model = Model(**SIZES, **MODELS[name])
    arrays = parameter_arrays(model)
    assert arrays == flatten(parameter_specs(model))
    assert sum(spec.nbytes // 4 for spec in arrays.values()) == parameter_count(model)


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(),
        Optimizer(moment_dtype="bfloat16", offload_to_host=True),
        Optimizer(kind="muon", moment_dtype="bfloat16"),
        Optimizer(moment_dtype="int8", offload_to_host=True),
        Optimizer(kind="muon", moment_dtype="int8"),
        Optimizer(kind="lion", moment_dtype="int8", ema_decay=0.9),
        Optimizer(kind="sgd", moment_dtype="int8"),
        Optimizer(kind="adafactor", offload_to_host=True),
        Optimizer(kind="schedule_free"),
        Optimizer(kind="soap", max_precondition_dim=32, moment_dtype="bfloat16"),
    ],
)
def test_so_are_weights_and_moments_of_a_state(optimizer):
    model = Model(**SIZES)
    program = Program(model=model, batch=Batch(global_batch_size=4, seq_len=8), optimizer=optimizer)
    traced = flatten({"state": state_specs_of(resolve(program))})
    others = "state/step", "state/key", "/count", "/weight_sum", "/max_rate"
    arrays = {path: spec for path, spec in traced.items() if not path.endswith(others)}
    assert arrays == state_arrays(parameter_arrays(model), optimizer)


@pytest.mark.parametrize(
    ("mesh", "rules", "batch"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, ("zero1", "fsdp", "tensor"), {}),
        ({"data": 8}, ("zero2",), {"microbatches": 2}),
        ({"stage": 2, "data": 4}, ("data", "pipeline"), {"microbatches": 2}),  # 5 layers on 2
    ],
)
def test_weights_and_moments_take_what_the_plan_says(mesh, rules, batch):
    program = Program(
        target="v5e:2x4",
        mesh=Mesh(**mesh),
        rules=rules,
        model=Model(**SIZES, kv_heads=2),
        batch=Batch(global_batch_size=32, seq_len=16, **batch),
    )
    of = resolve(program)
    plan = make_plan(flatten({"state": state_specs_of(of)}), of.rules, of.mesh)
    weights = shard_weights(of)
    assert sum(one.parameter_bytes for one in weights) == plan.bytes_per_device("parameter")
    counters = sum(
        plan.shard_bytes(path)
        for path, layout in plan.layouts.items()
        if layout.spec.role == "optimizer" and "adam/mu/" not in path and "adam/nu/" not in path
    )
    moments = plan.bytes_per_device("optimizer") - counters
    assert sum(one.moment_bytes for one in weights) == moments
