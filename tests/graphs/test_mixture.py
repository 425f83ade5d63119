"""Mixtures of experts: Hugging Face's numbers on one device, and one device's on eight."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import LLAMA, batch, program, state_of
from test_flash import installed
from test_parallel import assert_close, loss_and_gradients

from graphtrain.compile import worker
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Batch,
    Mesh,
    MixtureOfExperts,
    Model,
    PipelineSettings,
    Program,
)
from graphtrain.graphs.build import accumulate_gradients
from graphtrain.models import dropless, moe
from graphtrain.models.decoder import forward, initialize
from graphtrain.models.flops import (
    attention_flops_per_token,
    flops_per_token,
    parameter_count,
    step_flops_per_token,
)
from graphtrain.models.grouped_matmul import arrange, grouped_matmul
from graphtrain.models.routing import layer_terms, router_metrics, slot_in_expert
from lowering.hlo.collectives import read

DROPLESS = MixtureOfExperts(experts=4, experts_per_token=2)
ROOMY = MixtureOfExperts(experts=4, experts_per_token=2, capacity_factor=1.0)
DEFAULT = program().rules
WAYS = {
    "expert": Mesh(expert=4),
    "expert, data": Mesh(data=2, expert=4),
    "expert, tensor, sequence": Mesh(expert=4, tensor=2),
    "expert, fsdp": Mesh(fsdp=2, expert=4),
    "expert, data, tensor": Mesh(data=2, expert=2, tensor=2),
    "expert, context": Mesh(expert=4, context=2),
}


def mixed(mixture, **settings):
    return program(model=dataclasses.replace(LLAMA, moe=mixture), **settings)


@pytest.mark.parametrize("mixture", [DROPLESS, ROOMY], ids=["dropless", "capacity"])
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_equal_those_of_one_device(way, mixture):
    devices = int(np.prod(list(vars(WAYS[way]).values())))
    batch = Batch(global_batch_size=16, seq_len=16, microbatches=2)
    split = mixed(mixture, target=f"cpu:{devices}", mesh=WAYS[way], batch=batch)
    assert_close(loss_and_gradients(split), loss_and_gradients(mixed(mixture, batch=batch)))


@pytest.mark.parametrize("mixture", [DROPLESS, ROOMY], ids=["dropless", "capacity"])
def test_biases_of_experts_have_the_gradients_of_one_device(mixture):
    biased = dataclasses.replace(mixture, expert_bias=True)
    split = mixed(biased, target="cpu:8", mesh=WAYS["expert, data, tensor"])
    assert_close(loss_and_gradients(split), loss_and_gradients(mixed(biased)))


@pytest.mark.parametrize("way", ["expert, tensor, sequence", "expert, fsdp"])
def test_an_expert_that_every_token_has_is_split_as_an_mlp(way):
    shared = dataclasses.replace(DROPLESS, shared_expert_mlp=24)
    batch = Batch(global_batch_size=16, seq_len=16, microbatches=2)
    split = mixed(shared, target="cpu:8", mesh=WAYS[way], batch=batch)
    assert_close(loss_and_gradients(split), loss_and_gradients(mixed(shared, batch=batch)))


@pytest.mark.parametrize("mixture", [DROPLESS, ROOMY], ids=["dropless", "capacity"])
def test_stages_of_mixtures_have_the_gradients_of_one_device(mixture):
    settings = {"batch": Batch(global_batch_size=16, seq_len=16, microbatches=2)}
    split = mixed(
        mixture,
        target="cpu:8",
        mesh=Mesh(data=2, stage=2, expert=2),
        pipeline=PipelineSettings(schedule="gpipe"),
        **settings,
    )
    assert_close(loss_and_gradients(split), loss_and_gradients(mixed(mixture, **settings)))


@pytest.mark.parametrize("way", [None, "expert", "expert, tensor, sequence"])
def test_grouped_matmul_equals_the_ragged_product(way, monkeypatch):
    mesh = WAYS[way] if way else Mesh()
    batch = Batch(global_batch_size=16, seq_len=16, microbatches=2)
    target = f"cpu:{int(np.prod(list(vars(mesh).values())))}"
    biased = dataclasses.replace(DROPLESS, expert_bias=True)
    model = dataclasses.replace(LLAMA, mlp=64, moe=biased)  # shards are multiples of 16
    of = program(model=model, target=target, mesh=mesh, batch=batch)
    ragged = loss_and_gradients(of)
    calls = []

    def interpreted(*arguments):
        calls.append(arguments)
        return grouped_matmul(*arguments, interpret=True)

    monkeypatch.setattr(dropless, "grouped_matmul", interpreted)
    monkeypatch.setattr(dropless, "_has_grouped_matmul", lambda *sizes: True)
    other = dataclasses.replace(of.model, attention="dense")  # equal here, and traced again
    assert_close(loss_and_gradients(dataclasses.replace(of, model=other)), ragged)
    assert calls


@pytest.mark.parametrize("counts", [[300, 0, 0, 0], [0, 0, 5, 200], [128, 128, 1, 0]])
def test_grouped_matmul_pads_each_expert_to_blocks(counts):
    """Experts without rows, full blocks, and choices of another device's experts (index 4)."""
    keys = jax.random.split(jax.random.key(0), 3)
    experts = jax.random.permutation(keys[0], jnp.repeat(jnp.arange(5), jnp.array([*counts, 7])))
    rows = jax.random.normal(keys[1], (len(experts), 32))
    weights = jax.random.normal(keys[2], (4, 32, 48))

    def grouped(rows, weights):
        blocks = arrange(experts, 4)
        padded = jnp.zeros((blocks.rows, 32)).at[blocks.slots].set(rows, mode="drop")
        out = grouped_matmul(padded, weights, blocks, len(rows), interpret=True)
        return jnp.take(out, blocks.slots, axis=0, mode="fill", fill_value=0)

    def gathered(rows, weights):
        own = jnp.pad(weights, ((0, 1), (0, 0), (0, 0)))[experts]
        return jnp.einsum("ri,rio->ro", rows, own, precision="highest")

    for ours, theirs in zip(
        jax.value_and_grad(lambda *of: jnp.sin(grouped(*of)).sum(), (0, 1))(rows, weights),
        jax.value_and_grad(lambda *of: jnp.sin(gathered(*of)).sum(), (0, 1))(rows, weights),
        strict=True,
    ):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), ours, theirs)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_dropless_mixture_on_gpus_computes_active_experts_only(remat):
    if not installed("jax_plugins.xla_cuda13"):
        pytest.skip("needs jax_plugins.xla_cuda13")
    model = Model(
        layers=2, embed=128, heads=2, kv_heads=2, head_dim=64, mlp=256, vocab=512, remat=remat,
        moe=MixtureOfExperts(experts=16, experts_per_token=2),
    )  # fmt: skip
    of = Program(
        target="h100:1", model=model, batch=Batch(global_batch_size=8, seq_len=1024)
    )  # 1,024 rows for each expert
    lowered = worker.lower(resolve(of), "train")
    text = lowered.handle.compile(compiler_options=lowered.options).as_text()
    counted = read(text, resolve(of).mesh).flops
    attention = attention_flops_per_token(model, 1024)
    needed = step_flops_per_token(of) + attention / 2  # the kernel recomputes scores
    if remat == "full":
        needed += (step_flops_per_token(of) - 6 * model.embed * model.vocab) / 3 - attention / 3
    assert 1 <= counted / (needed * of.batch.tokens) <= 1.25


def test_logits_equal_those_of_mixtral():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = Model(
        layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=64, dtype="float32", remat="none",
        init_std=0.2, moe=MixtureOfExperts(experts=4, experts_per_token=2),
    )  # fmt: skip
    ours = jax.device_get(initialize(model, jax.random.key(0)))
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        rms_norm_eps=model.norm_epsilon, rope_theta=model.rope_theta, sliding_window=None,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.MixtralForCausalLM(config).float().eval()
    theirs.load_state_dict(
        {name: torch.tensor(value) for name, value in _as_mixtral(ours).items()},
        strict=True,
    )
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits.numpy()
    got, _ = forward(model, ours, jnp.array(tokens))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def _as_mixtral(ours):
    """Our weights by Hugging Face's names; its matrices are (out, in)."""
    named = {
        "model.embed_tokens.weight": ours["embedding"]["tokens"],
        "model.norm.weight": ours["final_norm"]["scale"],
        "lm_head.weight": ours["head"].T,
    }
    layers = ours["layers"]
    for index in range(2):
        at = f"model.layers.{index}"
        attention = {name: array[index] for name, array in layers["attention"].items()}
        for theirs, name in (("q", "query"), ("k", "key"), ("v", "value")):
            named[f"{at}.self_attn.{theirs}_proj.weight"] = attention[name].reshape(32, -1).T
        named[f"{at}.self_attn.o_proj.weight"] = attention["output"].reshape(-1, 32).T
        mlp = {name: array[index] for name, array in layers["mlp"].items()}
        both = np.concatenate([mlp["gate"], mlp["up"]], axis=-1)
        named[f"{at}.mlp.gate.weight"] = mlp["router"].T
        named[f"{at}.mlp.experts.gate_up_proj"] = both.transpose(0, 2, 1)
        named[f"{at}.mlp.experts.down_proj"] = mlp["down"].transpose(0, 2, 1)
        named[f"{at}.input_layernorm.weight"] = layers["attention_norm"]["scale"][index]
        named[f"{at}.post_attention_layernorm.weight"] = layers["mlp_norm"]["scale"][index]
    return named


def test_with_room_for_all_a_capacity_drops_none():
    tokens = jnp.array(np.random.default_rng(1).integers(0, 64, (2, 16)))
    wide = MixtureOfExperts(experts=4, experts_per_token=2, capacity_factor=4.0)
    parameters = initialize(dataclasses.replace(LLAMA, moe=DROPLESS), jax.random.key(0))
    results = [
        forward(dataclasses.replace(LLAMA, moe=mixture), parameters, tokens)[0]
        for mixture in (DROPLESS, wide)
    ]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_a_line_is_in_the_order_of_the_sequence():
    experts = jnp.array([[[0, 1], [1, 0], [0, 2], [2, 1]]])
    assert slot_in_expert(experts, 3).tolist() == [[[0, 0], [1, 1], [2, 0], [1, 2]]]


def test_balanced_experts_lose_least():
    mixture = MixtureOfExperts(experts=2, experts_per_token=1)
    even = jnp.zeros((1, 4, 2))
    metrics = router_metrics(even, jnp.array([[[0], [1], [0], [1]]]), mixture)
    assert float(metrics["balance_loss"]) == pytest.approx(1.0)
    assert float(metrics["router_z_loss"]) == pytest.approx(np.log(2) ** 2)
    skewed = jnp.array([[[9.0, 0.0]] * 4])
    worse = router_metrics(skewed, jnp.zeros((1, 4, 1), jnp.int32), mixture)
    assert float(worse["balance_loss"]) == pytest.approx(2.0, abs=1e-3)


def metrics_in_numpy(scores, per_token, capacity_factor):
    """Of one layer, by loops; the slots of an expert fill in sequence order."""
    _, length, experts = scores.shape
    probs = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    chosen = np.zeros(experts)
    dropped = 0
    for sequence in probs:
        used = np.zeros(experts)
        for token in sequence:
            for expert in np.argsort(-token)[:per_token]:
                chosen[expert] += 1
                used[expert] += 1
                dropped += used[expert] > np.ceil(capacity_factor * length * per_token / experts)
    mean = chosen.sum() / experts
    return {
        "balance_loss": experts * (chosen / chosen.sum() * probs.mean((0, 1))).sum(),
        "router_z_loss": (np.log(np.exp(scores).sum(-1)) ** 2).mean(),
        "expert_load_max": chosen.max() / mean,
        "expert_load_min": chosen.min() / mean,
        "dropped_choices": dropped / chosen.sum(),
    }


def test_metrics_and_losses_of_a_step_are_those_of_numpy(monkeypatch):
    """The scores of both layers and microbatches are recorded; the metrics are their means."""
    mixture = MixtureOfExperts(
        experts=4, experts_per_token=2, capacity_factor=1.0, balance_loss=0.5, router_z_loss=0.25
    )
    recorded, routed = [], moe.top_k

    def record(scores, *of):
        jax.debug.callback(lambda found: recorded.append(np.asarray(found, np.float64)), scores)
        return routed(scores, *of)

    monkeypatch.setattr(moe, "top_k", record)
    model = dataclasses.replace(LLAMA, moe=mixture, init_std=0.5)
    of = program(model=model, batch=Batch(global_batch_size=8, seq_len=16, microbatches=2))
    gradients = jax.jit(partial(accumulate_gradients, resolve(of)))
    _, got = gradients(state_of(of), batch(of))
    jax.effects_barrier()
    assert len(recorded) == 4
    each = [metrics_in_numpy(scores, 2, 1.0) for scores in recorded]
    assert each[0]["dropped_choices"] > 0
    for name in each[0]:
        want = np.mean([metrics[name] for metrics in each])
        np.testing.assert_allclose(got[name], want, rtol=1e-5, err_msg=name)
    terms = layer_terms({name: got[name] for name in each[0]}, mixture, layers=1)
    assert terms.losses["balance_loss"] == 0.5 * got["balance_loss"]
    assert terms.losses["router_z_loss"] == 0.25 * got["router_z_loss"]


def test_mixtral_has_its_published_size():
    mixtral = Model(
        layers=32, embed=4096, heads=32, kv_heads=8, mlp=14336, vocab=32000,
        moe=MixtureOfExperts(experts=8, experts_per_token=2),
    )  # fmt: skip
    assert parameter_count(mixtral) == pytest.approx(46.7e9, rel=1e-3)
    active = (flops_per_token(mixtral, 0) / 6) + 4096 * 32000  # and the embedding, looked up
    assert active == pytest.approx(12.9e9, rel=5e-3)
