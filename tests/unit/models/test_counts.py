import math
import subprocess
import sys
from typing import Any

import jax
import pytest
from jax.extend.core import jaxprs_in_params

from graphtrain.config.schema import LatentAttention, Model
from graphtrain.models.decoder import forward, initialize, parameter_specs
from graphtrain.models.flops import flops_per_token, parameter_count

SMALL: dict[str, Any] = {"layers": 3, "embed": 24, "heads": 6, "mlp": 40, "vocab": 50}
GPT2: dict[str, Any] = {
    "positions": "learned",
    "max_position_embeddings": 1024,
    "norm": "layer",
    "activation": "gelu_tanh",
    "bias": "all",
    "tie_word_embeddings": True,
}
LATENT = LatentAttention(kv_lora_rank=16, q_lora_rank=20, qk_rope_head_dim=4, v_head_dim=6)
VARIANTS: list[dict[str, Any]] = [
    {},
    GPT2,
    {"kv_heads": 2, "head_dim": 8, "bias": "qkv"},
    {"norm": "layer", "activation": "geglu", "bias": "all", "positions": "alibi"},
    {"norm": "layer", "activation": "gelu", "tie_word_embeddings": True},
    {"bias": "all"},
    {"bias": "attention", "embedding_norm": True},
    {"qk_norm": True, "post_norm": True, "rms_norm_offset": True, "head_dim": 8},
    {"partial_rotary_factor": 0.5, "head_dim": 8},
    {"head_dim": 12, "latent_attention": LATENT},
]


def test_published_parameter_counts():
    gpt2 = Model(layers=12, embed=768, heads=12, mlp=3072, vocab=50257, **GPT2)
    llama2_7b = Model(layers=32, embed=4096, heads=32, mlp=11008, vocab=32000)
    llama3_8b = Model(layers=32, embed=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256)
    assert parameter_count(gpt2) == 124_439_808
    assert parameter_count(llama2_7b) == 6_738_415_616
    assert parameter_count(llama3_8b) == 8_030_261_248


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_counts_equal_the_specs(settings):
    model = Model(**SMALL, **settings)
    sizes = [math.prod(spec.shape) for spec in jax.tree.leaves(parameter_specs(model))]
    assert parameter_count(model) == sum(sizes)


@pytest.mark.parametrize("settings", [*VARIANTS[:3], VARIANTS[-1]], ids=str)
def test_flops_equal_the_matrix_products_of_a_training_step(settings):
    model = Model(**SMALL, **settings, remat="none")
    tokens = jax.numpy.zeros((2, 16), jax.numpy.int32)
    step = jax.grad(lambda parameters: forward(model, parameters, tokens)[0].sum())
    shapes = jax.eval_shape(lambda: initialize(model, jax.random.key(0)))
    jaxpr = jax.make_jaxpr(step)(shapes)
    assert flops_per_token(model, 16) * tokens.size == matrix_flops(jaxpr.jaxpr)


def matrix_flops(jaxpr: Any) -> int:
    """Of all products in a jaxpr; a scan's body counts as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            left = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(left[i] for i in contracted)
        inner = jaxprs_in_params(equation.params)
        total += equation.params.get("length", 1) * sum(matrix_flops(each) for each in inner)
    return total


def test_counting_imports_neither_jax_nor_flax():
    code = (
        "import sys, graphtrain.models.flops; "
        "sys.exit(', '.join({'jax', 'flax', 'lowering'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stderr == b"\n"
