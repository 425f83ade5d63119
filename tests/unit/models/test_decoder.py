import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.config.schema import Model
from graphtrain.models.decoder import forward, head_inputs, initialize, parameter_specs

LLAMA = Model(
    layers=2,
    embed=32,
    heads=4,
    kv_heads=2,
    mlp=64,
    vocab=64,
    init_std=0.2,
    dtype="float32",
)
GPT2 = replace(
    LLAMA,
    kv_heads=4,
    positions="learned",
    max_position_embeddings=16,
    norm="layer",
    activation="gelu_tanh",
    bias="all",
    tie_word_embeddings=True,
)
TOKENS = np.random.default_rng(1).integers(0, 64, (2, 16), np.int32)


def logits(*arguments: Any, **options: Any) -> jax.Array:
    return forward(*arguments, **options)[0]


run = jax.jit(logits, static_argnums=0)
create = jax.jit(initialize, static_argnums=0)


def random_parameters(model: Model) -> Any:
    """Norms and biases are random too, so that none can be left out unseen."""
    random = np.random.default_rng(0)
    draw = lambda spec: np.float32(random.normal(0, 0.2, spec.shape))  # noqa: E731
    return jax.tree.map(draw, parameter_specs(model))


def loss(model: Model, parameters: Any, tokens: Any, key: jax.Array | None) -> jax.Array:
    scores = jax.nn.log_softmax(logits(model, parameters, tokens, dropout_key=key))
    return -jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1).mean()


def lowered(model: Model) -> str:
    """The program of loss and gradients, from shapes alone."""
    step = jax.jit(jax.value_and_grad(loss, 1), static_argnums=0)
    parameters = jax.eval_shape(lambda: initialize(model, jax.random.key(0)))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return step.lower(model, parameters, TOKENS, key).as_text()


def test_parameters_have_names_shapes_and_axes():
    specs = parameter_specs(LLAMA)
    query, down, tokens = (
        specs["layers"]["attention"]["query"],
        specs["layers"]["mlp"]["down"],
        specs["embedding"]["tokens"],
    )
    assert query.axes == ("layers", "embed", "heads", "head_dim")
    assert query.shape == (2, 32, 4, 8)
    assert (down.axes, down.shape) == (("layers", "mlp", "embed"), (2, 64, 32))
    assert (tokens.axes, tokens.shape) == (("vocab", "embed"), (64, 32))
    assert parameter_specs(GPT2)["embedding"]["positions"].axes == ("positions", "embed")


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_new_parameters_are_as_the_specs_say(model, dtype):
    specs = parameter_specs(model)
    model = replace(model, dtype=dtype)
    parameters = jax.eval_shape(lambda: initialize(model, jax.random.key(0)))
    assert jax.tree.structure(specs) == jax.tree.structure(parameters)
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(parameters), strict=True):
        assert (spec.shape, spec.dtype) == (array.shape, "float32")
        assert array.dtype == jnp.float32


def test_initial_weights_have_the_deviation_asked_for_and_repeat_for_a_key():
    model = replace(GPT2, layers=8, embed=64, head_dim=16, mlp=256, init_std=0.02)
    parameters, again, other = (create(model, jax.random.key(seed)) for seed in (3, 3, 4))
    layers = parameters["layers"]
    for array, deviation in [
        (parameters["embedding"]["tokens"], 0.02),
        (layers["attention"]["query"], 0.02),
        (layers["mlp"]["up"], 0.02),
        (layers["attention"]["output"], 0.02 / 4),
        (layers["mlp"]["down"], 0.02 / 4),
    ]:
        assert abs(array.std() / deviation - 1) < 0.05
        assert abs(array.mean()) < 0.05 * deviation
    first, second = layers["attention"]["query"][:2]
    assert not np.allclose(first, second)
    assert np.all(layers["mlp"]["up_bias"] == 0)
    assert np.all(layers["mlp_norm"]["scale"] == 1)
    jax.tree.map(np.testing.assert_array_equal, parameters, again)
    assert not np.allclose(layers["mlp"]["up"], other["layers"]["mlp"]["up"])


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_bfloat16_is_close_to_float32(model):
    parameters = random_parameters(model)
    want = run(model, parameters, TOKENS)
    got = run(replace(model, dtype="bfloat16"), parameters, TOKENS)
    assert got.dtype == want.dtype == jnp.float32
    # A rounding to bfloat16 is off by 2^-9; some ten lie between the tokens and the scores.
    assert np.sqrt(np.mean((got - want) ** 2)) < 10 * 2**-9 * np.sqrt(np.mean(want**2))


def test_logits_are_the_head_s_product_with_what_it_reads():
    parameters = random_parameters(LLAMA)
    read, head, _ = jax.jit(head_inputs, static_argnums=0)(LLAMA, parameters, TOKENS)
    want = run(LLAMA, parameters, TOKENS)
    np.testing.assert_allclose(read.normed() @ head, want, rtol=1e-5, atol=1e-5)


def test_remat_changes_memory_but_neither_loss_nor_gradients():
    inputs = random_parameters(LLAMA), TOKENS, jax.random.key(5)
    step = jax.jit(jax.value_and_grad(loss, 1), static_argnums=0)
    full, dots, none = (
        step.lower(replace(LLAMA, dropout=0.1, remat=remat), *inputs).compile()
        for remat in ("full", "dots", "none")
    )
    used = [each.memory_analysis().temp_size_in_bytes for each in (full, dots, none)]
    assert used == sorted(set(used))
    want = none(*inputs)
    for got in (full(*inputs), dots(*inputs)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_dropout_needs_a_key_and_repeats_for_it():
    model = replace(LLAMA, dropout=0.3)
    parameters = random_parameters(model)
    off, never = run(model, parameters, TOKENS), run(LLAMA, parameters, TOKENS)
    np.testing.assert_array_equal(off, never)
    first, again, other = (
        run(model, parameters, TOKENS, dropout_key=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert not np.allclose(first, off)


def test_a_token_past_the_vocabulary_shows():
    scores = run(LLAMA, random_parameters(LLAMA), np.where(TOKENS[0, 7] == TOKENS, 64, TOKENS))
    assert np.isnan(scores[0, 7:]).all()


def test_longer_sequences_than_positions_are_refused():
    words = r"sequences of 17 tokens are longer than model\.max_position_embeddings = 16"
    with pytest.raises(ValueError, match=words):
        logits(GPT2, random_parameters(GPT2), jnp.zeros((1, 17), jnp.int32))


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_program_does_not_grow_with_depth(model):
    few, many = (len(lowered(replace(model, layers=layers))) for layers in (2, 8))
    assert abs(many - few) < 0.01 * few


def test_the_program_holds_no_tables():
    text = lowered(replace(LLAMA, positions="alibi")) + lowered(LLAMA)
    constants = re.findall(r"stablehlo\.constant.*", text)
    assert constants
    assert max(map(len, constants)) < 100


def test_every_product_is_bfloat16_with_float32_sums():
    products = re.findall(
        r"stablehlo\.dot_general.*: (.*)", lowered(replace(GPT2, dtype="bfloat16"))
    )
    assert products
    for types in products:
        assert re.fullmatch(r"\(tensor<\S*xbf16>, tensor<\S*xbf16>\) -> tensor<\S*xf32>", types)


def test_another_process_traces_the_same_program():
    code = f"import runpy; print(runpy.run_path({__file__!r})['lowered_models'](), end='')"
    environment = os.environ | {"PYTHONHASHSEED": "12345", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    assert other.stdout == lowered_models()


def lowered_models() -> str:
    return "".join(lowered(replace(model, dropout=0.1)) for model in (LLAMA, GPT2))
