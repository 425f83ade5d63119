"""Predicted memory of served models against that of compiled programs, without the machine."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from graphtrain.compile.worker import lower
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import (
    Batch,
    Mesh,
    MixtureOfExperts,
    Model,
    Program,
    Serve,
    TorchModel,
)
from graphtrain.config.serving_program import serving_program
from graphtrain.cost_model.serving_memory import temporaries
from graphtrain.planning.serving_programs import program_memory, served_sizes
from lowering.xla import backend as xla
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape

LLAMA = Model(layers=2, embed=1024, heads=16, kv_heads=4, mlp=2816, vocab=32000)
GPT2 = Model(
    layers=2,
    embed=768,
    heads=12,
    mlp=3072,
    vocab=50304,
    positions="learned",
    max_position_embeddings=1024,
    norm="layer",
    activation="gelu_tanh",
    bias="all",
    tie_word_embeddings=True,
)
MIXTURE = dataclasses.replace(LLAMA, moe=MixtureOfExperts(experts=8, experts_per_token=2))
# In a context of 2048, one layer has a rolling buffer of 768 positions (on GPUs 1024).
WINDOWS = dataclasses.replace(LLAMA, sliding_window=64, global_attention_every=2)
IMPORTED = TorchModel(hf=str(Path(__file__).parents[2] / "examples/hf-llama"))
WIDE = Model(layers=2, embed=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256)
# Model, target, mesh, and programs, of which the first one reads weights and state.
PAIRS = {
    "Llama, cpu:1": (LLAMA, "cpu:1", Mesh(), ["decode", "score_512", "score_packed_512"]),
    "Llama, cpu:8": (LLAMA, "cpu:8", Mesh(data=2, fsdp=2, tensor=2), ["decode", "score_512"]),
    "GPT-2, cpu:1": (GPT2, "cpu:1", Mesh(), ["decode_one", "first_prefill_64"]),
    "imported Llama, cpu:1": (IMPORTED, "cpu:1", Mesh(), ["decode"]),
    "mixture, cpu:1": (MIXTURE, "cpu:1", Mesh(), ["prefill_512"]),
    "windows, cpu:1": (WINDOWS, "cpu:1", Mesh(), ["decode", "copy_prefix", "score_rows_128"]),
    "windows, cpu:8": (WINDOWS, "cpu:8", Mesh(data=2, fsdp=2, tensor=2), ["decode"]),
    "windows, h100:1": (WINDOWS, "h100:1", Mesh(), ["decode"]),
    "Llama, h100:1": (LLAMA, "h100:1", Mesh(), ["decode_one"]),
    "GPT-2, h100:1": (GPT2, "h100:1", Mesh(), ["decode", "score_512", "score_rows_128"]),
    "Llama 8B, h100:8": (WIDE, "h100:8", Mesh(tensor=8), ["decode_one"]),
    "Llama in int8, cpu:1": (LLAMA, "cpu:1", Mesh(), ["decode", "score_512"]),
    "Llama in int8, h100:1": (LLAMA, "h100:1", Mesh(), ["decode", "decode_one", "score_512"]),
    "Llama 8B in int8, h100:8": (WIDE, "h100:8", Mesh(tensor=8), ["decode"]),
    "Llama in int8, v5e:2x2": (LLAMA, "v5e:2x2", Mesh(tensor=4), ["decode"]),
    "Llama, v5e:2x2": (LLAMA, "v5e:2x2", Mesh(tensor=4), ["decode", "score_512"]),
}


def served(name: str) -> ResolvedProgram:
    model, target, mesh, _ = PAIRS[name]
    if target.startswith("h100") and not importlib.util.find_spec("jax_plugins"):
        pytest.skip("needs the extra gpu")
    dtype = "int8" if "int8" in name else "auto"
    batch = Batch(global_batch_size=8, seq_len=2048 if model is WINDOWS else 1024)
    serve = Serve(slots=8, weights_dtype=dtype)
    settings = Program(target=target, model=model, mesh=mesh, batch=batch, serve=serve)
    return serving_program(resolve(settings))


@pytest.mark.parametrize("name", PAIRS)
def test_weights_and_cache_are_predicted_to_the_byte_and_the_peak_within_a_tenth(name):
    program, graphs = served(name), PAIRS[name][3]
    model = served_sizes(program)
    artifacts = {graph: xla.compile(lower(program, graph)) for graph in graphs}
    assert len(model.layers_by_positions) == (2 if name.startswith("windows") else 1)
    first = artifacts[graphs[0]].record
    others = sum(
        shard_bytes(fact, program.mesh)
        for path, fact in first["inputs"].items()
        if not path.startswith(("weights/", "state/"))
    )
    arguments = first["memory"]["arguments"] - others
    if program.target.platform == "tpu":  # pads the last dimensions of arrays
        assert model.resident_bytes == pytest.approx(arguments, rel=0.002)
    else:
        assert model.resident_bytes == arguments
    for graph, artifact in artifacts.items():
        compiled = program_memory(model, graph, artifact, None).temporaries
        predicted = model.resident_bytes + temporaries(model, graph)
        assert predicted == pytest.approx(model.resident_bytes + compiled, rel=0.1), graph


def test_decode_on_a_gpu_copies_no_weights():
    program = served("Llama, h100:1")
    model, artifact = served_sizes(program), xla.compile(lower(program, "decode"))
    compiled = program_memory(model, "decode", artifact, None).temporaries
    predicted = temporaries(model, "decode")
    assert predicted / 1.25 < compiled < predicted


def shard_bytes(fact: dict[str, Any], mesh: MeshShape) -> int:
    """Bytes of a device's shard of an input, in the record of a program."""
    spec = ArraySpec(tuple(fact["shape"]), (None,) * len(fact["shape"]), fact["dtype"])
    return spec.nbytes // mesh.size(tuple(name for names in fact["split"] for name in names))
