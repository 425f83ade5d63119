"""The decoder against Hugging Face's models: logits and every gradient, float32 against float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from graphtrain.config.schema import Model
from graphtrain.models.decoder import logits, parameter_specs

LAYERS, EMBED, HEADS, MLP, VOCAB, LENGTH = 2, 48, 6, 80, 96, 24
SIZES: dict[str, Any] = {
    "layers": LAYERS,
    "embed": EMBED,
    "heads": HEADS,
    "mlp": MLP,
    "vocab": VOCAB,
    "dtype": "float32",
}
Read = Callable[[str], np.ndarray]  # by Hugging Face's name; ? stands for every layer

random = np.random.default_rng(0)
TOKENS = random.integers(0, VOCAB, (2, LENGTH))
TARGETS = random.integers(0, VOCAB, (2, LENGTH))


def linear(array: np.ndarray, *shape: int) -> np.ndarray:
    """From (layers, out, in) to (layers, in, out), with dimensions split as in shape."""
    return array.swapaxes(-1, -2).reshape(len(array), *shape)


def llama_tree(read: Read, model: Model) -> dict[str, Any]:
    """For Llama and Qwen2, whose query, key and value have biases."""
    attention, mlp = "model.layers.?.self_attn", "model.layers.?.mlp"
    head_dim = EMBED // HEADS
    tree = {
        "embedding": {"tokens": read("model.embed_tokens.weight")},
        "layers": {
            "attention_norm": {"scale": read("model.layers.?.input_layernorm.weight")},
            "attention": {
                "output": linear(read(f"{attention}.o_proj.weight"), HEADS, head_dim, EMBED)
            },
            "mlp_norm": {"scale": read("model.layers.?.post_attention_layernorm.weight")},
            "mlp": {
                name: linear(read(f"{mlp}.{name}_proj.weight"), *shape)
                for name, shape in {
                    "gate": (EMBED, MLP),
                    "up": (EMBED, MLP),
                    "down": (MLP, EMBED),
                }.items()
            },
        },
        "final_norm": {"scale": read("model.norm.weight")},
    }
    for name, heads in {"query": HEADS, "key": model.kv_heads, "value": model.kv_heads}.items():
        weight, bias = (f"{attention}.{name[0]}_proj.{kind}" for kind in ("weight", "bias"))
        tree["layers"]["attention"][name] = linear(read(weight), EMBED, heads, head_dim)
        if model.bias == "qkv":
            shape = (LAYERS, heads, head_dim)
            tree["layers"]["attention"][f"{name}_bias"] = read(bias).reshape(shape)
    return tree if model.tied_head else tree | {"head": read("lm_head.weight").T}


def gpt2_tree(read: Read, model: Model) -> dict[str, Any]:
    """Its weights are (in, out), with query, key and value side by side in one."""
    block, head_dim = "transformer.h.?", EMBED // HEADS
    weight = read(f"{block}.attn.c_attn.weight").reshape(LAYERS, EMBED, 3, HEADS, head_dim)
    bias = read(f"{block}.attn.c_attn.bias").reshape(LAYERS, 3, HEADS, head_dim)
    output = read(f"{block}.attn.c_proj.weight").reshape(LAYERS, HEADS, head_dim, EMBED)
    attention = {"output": output, "output_bias": read(f"{block}.attn.c_proj.bias")}
    for index, name in enumerate(("query", "key", "value")):
        attention |= {name: weight[:, :, index], f"{name}_bias": bias[:, index]}
    return {
        "embedding": {
            "tokens": read("transformer.wte.weight"),
            "positions": read("transformer.wpe.weight"),
        },
        "layers": {
            "attention_norm": norm(read, f"{block}.ln_1"),
            "attention": attention,
            "mlp_norm": norm(read, f"{block}.ln_2"),
            "mlp": {
                "up": read(f"{block}.mlp.c_fc.weight"),
                "up_bias": read(f"{block}.mlp.c_fc.bias"),
                "down": read(f"{block}.mlp.c_proj.weight"),
                "down_bias": read(f"{block}.mlp.c_proj.bias"),
            },
        },
        "final_norm": norm(read, "transformer.ln_f"),
    }


def bloom_tree(read: Read, model: Model) -> dict[str, Any]:
    """Its query, key and value are side by side within each head."""
    block, head_dim = "transformer.h.?", EMBED // HEADS
    weight = linear(
        read(f"{block}.self_attention.query_key_value.weight"), EMBED, HEADS, 3, head_dim
    )
    bias = read(f"{block}.self_attention.query_key_value.bias").reshape(LAYERS, HEADS, 3, head_dim)
    output = linear(read(f"{block}.self_attention.dense.weight"), HEADS, head_dim, EMBED)
    attention = {"output": output, "output_bias": read(f"{block}.self_attention.dense.bias")}
    for index, name in enumerate(("query", "key", "value")):
        attention |= {name: weight[:, :, :, index], f"{name}_bias": bias[:, :, index]}
    return {
        "embedding": {"tokens": read("transformer.word_embeddings.weight")},
        "layers": {
            "attention_norm": norm(read, f"{block}.input_layernorm"),
            "attention": attention,
            "mlp_norm": norm(read, f"{block}.post_attention_layernorm"),
            "mlp": {
                "up": linear(read(f"{block}.mlp.dense_h_to_4h.weight"), EMBED, 4 * EMBED),
                "up_bias": read(f"{block}.mlp.dense_h_to_4h.bias"),
                "down": linear(read(f"{block}.mlp.dense_4h_to_h.weight"), 4 * EMBED, EMBED),
                "down_bias": read(f"{block}.mlp.dense_4h_to_h.bias"),
            },
        },
        "final_norm": norm(read, "transformer.ln_f"),
    }


def norm(read: Read, name: str) -> dict[str, np.ndarray]:
    return {"scale": read(f"{name}.weight"), "bias": read(f"{name}.bias")}


def llama(**settings: Any) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**llama_sizes(), rms_norm_eps=1e-5, **settings)
    )


def qwen2() -> torch.nn.Module:
    config = transformers.Qwen2Config(**llama_sizes(), rms_norm_eps=1e-6, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def llama_sizes() -> dict[str, Any]:
    return {
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    }


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_embd=EMBED, n_inner=MLP, n_layer=LAYERS, n_head=HEADS, n_positions=32, vocab_size=VOCAB
    )
    return transformers.GPT2LMHeadModel(config)


def bloom() -> torch.nn.Module:
    config = transformers.BloomConfig(
        hidden_size=EMBED, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCAB
    )
    reference = transformers.BloomForCausalLM(config)
    reference.transformer.word_embeddings_layernorm = torch.nn.Identity()  # Bloom's alone
    return reference


LLAMA = Model(**SIZES, kv_heads=2)
GEGLU = Model(**SIZES, kv_heads=2, activation="geglu", rope_base=500_000.0)
QWEN2 = Model(**SIZES, kv_heads=2, bias="qkv", tied_head=True, norm_epsilon=1e-6)
GPT2 = Model(
    **SIZES,
    positions="learned",
    max_length=32,
    norm="layer",
    activation="gelu_tanh",
    bias="all",
    tied_head=True,
)
BLOOM = Model(
    **SIZES | {"mlp": 4 * EMBED},
    positions="alibi",
    norm="layer",
    activation="gelu_tanh",
    bias="all",
    tied_head=True,
)
CASES = {
    "llama": (LLAMA, llama, llama_tree),
    "geglu": (
        GEGLU,
        lambda: llama(
            hidden_act="gelu",
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        ),
        llama_tree,
    ),
    "qwen2": (QWEN2, qwen2, llama_tree),
    "gpt2": (GPT2, gpt2, gpt2_tree),
    "bloom": (BLOOM, bloom, bloom_tree),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_all_gradients_equal_hugging_faces(case):
    model, build, tree = CASES[case]
    reference = randomised(build())
    want = reference(torch.tensor(TOKENS), use_cache=False).logits
    torch.nn.functional.cross_entropy(want.flatten(0, 1), torch.tensor(TARGETS).ravel()).backward()
    named = dict(reference.named_parameters())
    parameters = tree(reader({name: p.detach() for name, p in named.items()}), model)
    gradients = tree(reader({name: p.grad for name, p in named.items()}), model)

    assert jax.tree.structure(parameters) == jax.tree.structure(parameter_specs(model))
    parameters = jax.tree.map(np.float32, parameters)
    got, got_gradients = scores_and_gradients(model, parameters, TOKENS, TARGETS)
    assert_close(got, want.detach().numpy())
    jax.tree.map_with_path(assert_close_at, got_gradients, gradients)


def randomised(reference: torch.nn.Module) -> torch.nn.Module:
    """In float64, with weights large enough that every part of the model shows in its output."""
    generator = torch.Generator().manual_seed(0)
    for parameter in reference.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = float(parameter.ndim == 1) + 0.2 * noise
    return reference.double().eval()


def reader(arrays: dict[str, torch.Tensor]) -> Read:
    """Read arrays by name, stacked over layers where the name has a question mark."""

    def read(name: str) -> np.ndarray:
        if "?" not in name:
            return arrays[name].numpy()
        return np.stack([arrays[name.replace("?", str(i))].numpy() for i in range(LAYERS)])

    return read


@jax.jit(static_argnums=0)
def scores_and_gradients(model: Model, parameters: Any, tokens: Any, targets: Any) -> Any:
    def loss(parameters: Any) -> tuple[jax.Array, jax.Array]:
        scores = logits(model, parameters, tokens)
        log_shares = jax.nn.log_softmax(scores)
        return -jnp.take_along_axis(log_shares, targets[..., None], axis=-1).mean(), scores

    gradients, scores = jax.grad(loss, has_aux=True)(parameters)
    return scores, gradients


def assert_close(got: Any, want: np.ndarray, where: str = "logits") -> None:
    """To 1e-5 of the largest entry; key biases have no gradient, hence an absolute part."""
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error < 1e-5 * np.abs(want).max() + 1e-7, where


def assert_close_at(path: Any, got: Any, want: np.ndarray) -> None:
    assert_close(got, want, jax.tree_util.keystr(path))
