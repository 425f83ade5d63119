"""Dumps of the native decoder equal what transformers computes with the same weights."""

import pytest
import torch
from einops import rearrange
from programs import LLAMA, batch, program, state_of
from test_dump import dumped
from transformers import LlamaConfig, LlamaForCausalLM

from graphtrain.run.dumps.compare import compare_arrays

CONFIG = LlamaConfig(
    hidden_size=LLAMA.embed,
    num_hidden_layers=LLAMA.layers,
    num_attention_heads=LLAMA.heads,
    num_key_value_heads=LLAMA.kv_heads,
    intermediate_size=LLAMA.mlp,
    vocab_size=LLAMA.vocab,
    rms_norm_eps=LLAMA.norm_epsilon,
    rope_theta=LLAMA.rope_theta,
    tie_word_embeddings=False,
    attn_implementation="eager",
)
MODULES = {  # outputs of modules by the names of dumps
    "embedding": "model.embed_tokens",
    "layers/{}/attention_norm": "model.layers.{}.input_layernorm",
    "layers/{}/attention/query": "model.layers.{}.self_attn.q_proj",
    "layers/{}/attention/key": "model.layers.{}.self_attn.k_proj",
    "layers/{}/attention/output": "model.layers.{}.self_attn.o_proj",
    "layers/{}/mlp_norm": "model.layers.{}.post_attention_layernorm",
    "layers/{}/mlp/gate": "model.layers.{}.mlp.gate_proj",
    "layers/{}/mlp/output": "model.layers.{}.mlp.down_proj",
    "layers/{}/output": "model.layers.{}",
    "final_norm": "model.norm",
    "logits": "lm_head",
}


def transposed(parameters):
    """Return the weights of a native model under the names of transformers."""
    layers = parameters["layers"]
    weights = {
        "model.embed_tokens.weight": parameters["embedding"]["tokens"],
        "model.norm.weight": parameters["final_norm"]["scale"],
        "lm_head.weight": parameters["head"].T,
    }
    for layer in range(LLAMA.layers):
        attention = {name: array[layer] for name, array in layers["attention"].items()}
        prefix = f"model.layers.{layer}"
        for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
            matrix = rearrange(attention[name], "e h d -> (h d) e")
            weights[f"{prefix}.self_attn.{short}_proj.weight"] = matrix
        output = rearrange(attention["output"], "h d e -> e (h d)")
        weights[f"{prefix}.self_attn.o_proj.weight"] = output
        for name in ("gate", "up", "down"):
            weights[f"{prefix}.mlp.{name}_proj.weight"] = layers["mlp"][name][layer].T
        for name, theirs in (("attention_norm", "input"), ("mlp_norm", "post_attention")):
            weights[f"{prefix}.{theirs}_layernorm.weight"] = layers[name]["scale"][layer]
    return {name: torch.tensor(array.copy()) for name, array in weights.items()}


def keep_output(outputs, name):
    """Return a hook that keeps the output of a module, with its gradient."""

    def keep(module, inputs, output):
        outputs[name] = output[0] if isinstance(output, tuple) else output
        outputs[name].retain_grad()

    return keep


@pytest.fixture(scope="module")
def pair():
    """The arrays of a dump, and outputs of modules with their gradients by the names of dumps."""
    of = program()
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(transposed(state_of(of)["parameters"]))
    theirs = {}
    for name, module in MODULES.items():
        for layer in range(LLAMA.layers) if "{}" in name else (0,):
            keep = keep_output(theirs, name.format(layer))
            model.get_submodule(module.format(layer)).register_forward_hook(keep)
    rows = {name: torch.tensor(array[0]) for name, array in batch(of).items()}
    logits = model(rows["tokens"].long()).logits
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), rows["targets"].long(), reduction="none"
    )
    ((losses * rows["weights"]).sum() / rows["weights"].sum()).backward()
    return dumped(of), theirs, model


NAMES = [
    name.format(layer)
    for name in MODULES
    for layer in (range(LLAMA.layers) if "{}" in name else (0,))
]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_activations_and_their_gradients_are_those_of_transformers(pair, kind):
    arrays, theirs, _ = pair
    for name in NAMES:
        tensor = theirs[name] if kind == "forward" else theirs[name].grad
        mine = arrays[f"{kind}/{name}"]
        expected = tensor.detach().numpy().reshape(mine.shape)
        assert compare_arrays(expected, mine)["relative"] < 1e-5, name


def test_gradients_of_parameters_are_those_of_transformers(pair):
    arrays, _, model = pair
    for layer in range(LLAMA.layers):
        matrix = model.get_parameter(f"model.layers.{layer}.mlp.down_proj.weight").grad.numpy().T
        mine = arrays[f"gradients/layers/{layer}/mlp/down"]
        assert compare_arrays(matrix, mine)["relative"] < 1e-5
