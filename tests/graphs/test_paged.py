"""Decode attention by JAX's kernels of paged attention: interpreted, and compiled for machines."""

import dataclasses
import functools
import importlib.util
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu
from programs import CUBE, LLAMA, loaded, placed_inputs, program, state_of

from graphtrain.compile import worker
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Batch, Mesh, Model, Program, Serve
from graphtrain.graphs import served_model
from graphtrain.graphs.names import graphs_for
from graphtrain.models.attention import cached, paged
from graphtrain.models.attention.cache_layout import cache_layout
from graphtrain.models.attention.cached import attend_to_cache
from graphtrain.models.attention.kernel_support import AttentionSpec, uses_paged_kernel
from graphtrain.models.attention.kv_cache import CacheRows, LayerCache, continue_rows
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.request_arrays import request_arrays
from lowering.machine.target import Target

CAPPED = dataclasses.replace(LLAMA, attn_logit_softcap=2.0)
SERVE = Serve(slots=4, context_length=700, prefill=(16,), tokens_per_call=3)
TARGETS = {"h100:8": "__gpu$xla.gpu.triton", "v5e:2x4": "tpu_custom_call"}


@pytest.mark.parametrize("where", ["alone", "mesh"])
def test_a_kernel_continues_sequences_as_products_do(where, monkeypatch):
    of = program(model=CAPPED, serve=SERVE, **CUBE if where == "mesh" else {})
    want = log_probs(of)
    gpu = Target.parse("h100:8")
    interpreted = functools.partial(paged.paged_attention, interpret=True)
    monkeypatch.setattr(cached, "traced_target", lambda: gpu)
    monkeypatch.setattr(cached, "uses_paged_kernel", lambda _, spec, target: spec.length == 1)
    monkeypatch.setattr(cached, "paged_attention", interpreted)
    monkeypatch.setattr(served_model, "cache_layout", lambda target: cache_layout(gpu))
    got = log_probs(of)
    assert want.shape == (2, 3, 4, 20)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slot", [None, 2])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_kernel_attends_to_what_a_sequence_has(platform, slot):
    layout = cache_layout(Target.parse("h100:1" if platform == "cuda" else "v5e:1x1"))
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:  # of bfloat16, to which the TPU's kernel rounds keys
        return jnp.array(random.standard_normal(shape), jnp.bfloat16).astype(jnp.float32)

    keys, values = draw(2, 4, 1024, 128), draw(2, 4, 1024, 128)  # h, b, k, d
    offsets = np.array([0, 5, 600, 1023], np.int32)[[slot] if slot else slice(None)]
    query, key, value = (draw(len(offsets), 1, heads, 128) for heads in (8, 2, 2))
    rows = CacheRows(jnp.array(offsets), 1024, slot and jnp.int32(slot), layout)
    scoring = ScoreTransform(128**-0.5, cap=3.0)

    def attend(use_kernel):
        cache = LayerCache(keys, values)
        with continue_rows(rows):
            if not use_kernel:
                return attend_to_cache(cache, query, key, value, scoring)
            cache.update(key, value)
            interpret = platform == "cuda"
            return paged.paged_attention(cache, query, rows, scoring, platform, interpret)

    with tpu.force_tpu_interpret_mode() if platform == "tpu" else nullcontext():
        got = attend(use_kernel=True)
    np.testing.assert_allclose(got, attend(use_kernel=False), rtol=1e-5, atol=1e-5)


def log_probs(of: Program) -> np.ndarray:
    """The most likely tokens' log-probabilities: two calls of decode, slots of many lengths."""
    served = graphs_for(resolve(of), "serve")[0].settings

    def graph(name: str):
        return loaded.__wrapped__(served, name)

    made = graph("serve_init")
    weights_and_state = made(placed_inputs(made, "parameters", state_of(of)["parameters"]))
    weights, state = weights_and_state["weights"], weights_and_state["state"]
    prefill, decode = graph("prefill_16"), graph("decode")
    sampling = SamplingParameters(temperature=0.0, max_tokens=7)
    request = placed_inputs(prefill, "request", request_arrays(sampling, (), 64, 64))
    random = np.random.default_rng(0)
    for slot, length in enumerate((1, 5, 16, 600)):
        for offset in range(0, length, 16):
            tokens = random.integers(0, 64, (1, 16), np.int32)
            count = min(16, length - offset)
            is_last = np.int32(offset + 16 >= length)
            scalars = np.int32(count), np.int32(slot), np.int32(offset), is_last
            placed = placed_inputs(prefill, "tokens", tokens)
            state = prefill(weights, state, placed, *scalars, request)["state"]
    every = placed_inputs(decode, "enabled", np.ones(4, np.int32))
    chosen = []
    for _ in range(2):
        outputs = decode(weights, state, every)
        state = outputs["state"]
        chosen.append(np.asarray(outputs["choices"]["top_log_probs"]))
    return np.stack(chosen)


@pytest.mark.parametrize("target", TARGETS)
def test_decode_has_a_kernel_in_each_layer_and_moves_no_cache(target):
    if target.startswith("h100") and not importlib.util.find_spec("jax_plugins"):
        pytest.skip("needs the extra gpu")
    model = Model(layers=2, embed=256, heads=8, kv_heads=4, head_dim=128, mlp=384, vocab=320)
    sizes = Batch(global_batch_size=8, seq_len=1000)
    of = Program(target=target, mesh=Mesh(data=2, tensor=4), model=model, batch=sizes)
    served = graphs_for(resolve(of), "serve")[0]
    text = compiled_text(served, "decode")
    assert text.count(f'custom_call_target="{TARGETS[target]}"') == 2
    moved = r"= bf16\[(\d+,)+1536,128\]\S* (copy|transpose|all-gather)(-start)?\("
    assert not re.search(moved, text)


def compiled_text(served: ResolvedProgram, name: str) -> str:
    lowered = worker.lower(served, name)
    return lowered.handle.compile(compiler_options=lowered.options).as_text()


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_of_beams_has_a_kernel_in_each_layer(target):
    if target.startswith("h100") and not importlib.util.find_spec("jax_plugins"):
        pytest.skip("needs the extra gpu")
    model = Model(layers=2, embed=256, heads=8, kv_heads=8, head_dim=128, mlp=384, vocab=320)
    of = Program(target=target, mesh=Mesh(tensor=8), model=model, serve=Serve(slots=6, beams=4),
                 batch=Batch(global_batch_size=8, seq_len=1000))  # fmt: skip
    text = compiled_text(graphs_for(resolve(of), "generate")[0], "decode_beams")
    assert text.count(f'custom_call_target="{TARGETS[target]}"') == 2


def test_a_kernel_computes_what_it_supports():
    spec = AttentionSpec(dtype="bfloat16", length=1, head_dim=128)
    gpu, chip, cpu = map(Target.parse, ("h100:1", "v5e:1x1", "cpu:1"))

    def uses(target, implementation="auto", **changed):
        return uses_paged_kernel(implementation, dataclasses.replace(spec, **changed), target)

    assert uses(gpu) and uses(chip) and uses(gpu, "flash") and uses(gpu, head_dim=64)
    assert not uses(cpu) and not uses(gpu, "dense") and not uses(chip, head_dim=64)
    assert not any(
        uses(gpu, **{name: value})
        for name, value in {
            "dtype": "float32",
            "length": 16,
            "window": True,
            "alibi": True,
            "head_dim": 96,
        }.items()
    )
