"""Adapters and frozen weights in few bits, on meshes and in stages: against one device."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from programs import LLAMA, alone, batch, loaded, placed_inputs, program

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Adapter,
    Batch,
    LatentAttention,
    Mesh,
    MixtureOfExperts,
    PipelineSettings,
)
from graphtrain.graphs.open_model import open_language_model
from graphtrain.models.decoder import parameter_specs
from graphtrain.weights.frozen import load_frozen_parameters
from lowering.trees import flatten, unflatten
from lowering.xla import backend as xla
from sharding_rules.errors import ShardingError

FOUR = {"target": "cpu:4", "mesh": Mesh(fsdp=2, tensor=2)}
EXPERTS = dataclasses.replace(
    LLAMA, moe=MixtureOfExperts(experts=4, shared_expert_mlp=48, expert_bias=True)
)


LATENT = dataclasses.replace(  # a dense layer before those of a mixture
    LLAMA,
    kv_heads=4,
    head_dim=10,
    latent_attention=LatentAttention(
        kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=4, v_head_dim=6
    ),
    moe=MixtureOfExperts(
        experts=4,
        experts_per_token=3,
        dense_layers=1,
        dense_mlp=48,
        shared_expert_mlp=16,
        bias_update_rate=0.0,
    ),
)


class Base:
    """Random weights, as a source of them."""

    def __init__(self, model):
        self.model, self.directory = model, Path("random")
        random = np.random.default_rng(0)
        specs = flatten(parameter_specs(model))
        self.arrays = {
            path: random.normal(0, 0.2, spec.shape).astype(np.float32)
            for path, spec in specs.items()
        }

    def part(self, path, layer, index):
        array = self.arrays[path]
        return (array if layer is None else array[layer])[index]


def frozen_of(of, graph):
    """The weights that a program keeps, read as a run reads them."""
    described = loaded(of, graph).inputs("frozen")
    return load_frozen_parameters(Base(of.model), resolve(of), described, xla.from_shards)


def new_state(of):
    """The same for every mesh; whatever begins as zeros is drawn instead."""
    state = jax.device_get(loaded(alone(of), "init")(np.uint32(0))["state"])
    return in_layout(of, state | {"parameters": unflatten(drawn(flatten(state["parameters"])))})


def drawn(arrays):
    random = np.random.default_rng(1)
    return {
        path: array if array.any() else random.normal(0, 0.1, array.shape).astype(np.float32)
        for path, array in arrays.items()
    }


def in_layout(of, tree):
    """A state, or parameters, as a program stores them for its stages."""
    stages = resolve(of).stages
    if stages is None or not isinstance(tree, dict):
        return tree
    if "layers" in tree:
        return jax.device_get(open_language_model(of.model).to_pipeline_layout(tree, stages))
    return {name: in_layout(of, part) for name, part in tree.items()}


def gradients_of(of):
    """Loss, metrics and gradients of the first step, on the host."""
    gradients = loaded(of, "gradients")
    state = placed_inputs(gradients, "state", new_state(of))
    inputs = placed_inputs(gradients, "batch", batch(of))
    return jax.device_get(gradients(state, frozen_of(of, "gradients"), inputs))


def same(got, want, tolerance):
    for path, array in flatten(want).items():
        largest = np.abs(array).max()
        assert largest > 0, path
        np.testing.assert_allclose(
            flatten(got)[path], array, rtol=0, atol=tolerance * largest, err_msg=path
        )


def take_steps(of):
    train = loaded(of, "train")
    state, frozen = placed_inputs(train, "state", new_state(of)), frozen_of(of, "train")
    before = jax.device_get(frozen)
    for seed in range(3):
        inputs = placed_inputs(train, "batch", batch(of, seed))
        state = train(state, frozen, inputs, np.float32(1e-2))["state"]
    for path, array in flatten(jax.device_get(frozen)).items():
        np.testing.assert_array_equal(array, flatten(before)[path], err_msg=path)
    return train, jax.device_get(state["parameters"])


def test_steps_are_those_of_one_device_with_a_base_in_four_bits():
    adapter = Adapter(rank=4, alpha=8.0, modules_to_save=("head",), dropout=0.2, base_dtype="nf4")
    of = program(
        adapter=adapter, batch=Batch(global_batch_size=8, seq_len=16, microbatches=2), **FOUR
    )
    _, want = take_steps(alone(of))
    train, got = take_steps(of)
    same(got, want, 1e-5)
    codes = train.inputs("frozen")["layers"]["mlp"]["up"]["codes"]
    assert codes.dtype == np.uint8 and codes.shape == (2, 32, 24)
    assert codes.sharding.shard_shape(codes.shape) == (2, 16, 12)
    moments = flatten(train.inputs("state")["optimizer"]["adam"]["mu"])
    assert set(moments) == set(flatten(want))


@pytest.mark.parametrize(
    ("base", "targets", "settings"),
    [
        (
            "int8",
            ("*", "mlp/down"),
            {"model": EXPERTS, "target": "cpu:4", "mesh": Mesh(expert=2, tensor=2)},
        ),
        (
            "bfloat16",
            ("*",),
            {
                "target": "cpu:4",
                "mesh": Mesh(data=2, tensor=2),
                "batch": Batch(
                    global_batch_size=8, seq_len=16, microbatches=2, gradient_reduction="per_step"
                ),
            },
        ),
        ("nf4", ("*",), {"model": LATENT, **FOUR}),
    ],
)
def test_gradients_are_those_of_one_device(base, targets, settings):
    dropout = 0.2 if base == "nf4" else 0.0
    adapter = Adapter(rank=4, alpha=8.0, base_dtype=base, target_modules=targets, dropout=dropout)
    of = program(adapter=adapter, **settings)
    same(gradients_of(of), gradients_of(alone(of)), 1e-5)


DEEP = dataclasses.replace(LLAMA, layers=4)
STAGES = {
    "circular": (
        DEEP,
        PipelineSettings(virtual_stages=2),
        Mesh(data=2, stage=2),
        ("head", "final_norm/*"),
    ),
    "1f1b": (
        DEEP,
        PipelineSettings(schedule="1f1b", layers_per_stage=(3, 1)),
        Mesh(stage=2, tensor=2),
        ("embedding/tokens",),
    ),
    "latents": (
        LATENT,
        PipelineSettings(schedule="1f1b"),
        Mesh(stage=2, fsdp=2),
        ("dense_layers/mlp_norm/*",),
    ),
    "interleaved": (
        DEEP,
        PipelineSettings(schedule="1f1b", virtual_stages=2),
        Mesh(data=2, stage=2),
        ("layers/mlp_norm/*",),
    ),
}


@pytest.mark.parametrize("case", STAGES)
def test_stages_have_the_gradients_of_one_device(case):
    model, pipeline, mesh, trained = STAGES[case]
    of = program(
        target="cpu:4",
        mesh=mesh,
        model=model,
        batch=Batch(global_batch_size=16, seq_len=16, microbatches=4),
        adapter=Adapter(
            rank=4,
            alpha=8.0,
            dropout=0.2 if model is DEEP else 0.0,
            base_dtype="nf4",
            modules_to_save=trained,
        ),
        pipeline=pipeline,
    )
    want = gradients_of(alone(of))
    want["gradients"] = in_layout(of, want["gradients"])
    same(gradients_of(of), want, 1e-5)


def test_a_pattern_that_names_nothing_is_refused():
    for adapter, words in (
        (
            Adapter(rank=4, alpha=8.0, target_modules=("router",)),
            r"target_modules: 'router' matches no eligible",
        ),
        (
            Adapter(rank=4, alpha=8.0, target_modules=("mlp/up",), dropout=0.1),
            r"dropout = 0.1 applies to the input of a matrix, and layers/mlp/up has one per expert",
        ),
        (
            Adapter(rank=4, alpha=8.0, modules_to_save=("haed",)),
            r"modules_to_save: 'haed' matches no eligible.*head",
        ),
    ):
        with pytest.raises(ShardingError, match=words):
            loaded(program(model=EXPERTS, adapter=adapter), "init")
