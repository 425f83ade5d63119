"""Models of transformers with random weights, and runs that would start from them."""

import dataclasses
from pathlib import Path

import torch
import transformers

from graphtrain.config.schema import Batch, Config, Data, Mesh, Program, Run, Serve
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.sources import ConvertedFolder

LLAMA = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=257,
    initializer_range=0.3,
)
GPT2 = transformers.GPT2Config(
    n_embd=32, n_layer=2, n_head=4, n_positions=96, vocab_size=257, initializer_range=0.3
)
GEMMA2 = transformers.Gemma2Config(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=257,
    initializer_range=0.3,
    sliding_window=16,
    max_position_embeddings=96,
    attention_dropout=0.0,
)


def save_model(folder: Path, source: transformers.PretrainedConfig) -> None:
    """Save a model with random weights."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(source).save_pretrained(folder)


def config_of(path: Path, source: transformers.PretrainedConfig, **mesh) -> Config:
    """A run on 8 devices that would start from a model with random weights."""
    save_model(path / "source", source)
    import_hugging_face(path / "source", path / "ours", lambda done, count: None)
    settings = dataclasses.replace(ConvertedFolder(path / "ours").model, dtype="float32", vocab=264)
    program = Program(
        target="cpu:8",
        mesh=Mesh(**mesh),
        model=settings,
        batch=Batch(global_batch_size=4, seq_len=96, microbatches=mesh.get("stage", 1)),
        serve=Serve(slots=4, prefill=(8, 32)),
    )
    run = Run(
        directory=str(path / "run"), steps=1, data=Data(train="data"), init_from=str(path / "ours")
    )
    return Config(program=program, run=run)
