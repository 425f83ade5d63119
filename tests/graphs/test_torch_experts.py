"""Mixtures of transformers: tokens go to their experts alone, and every expert is used."""

import dataclasses
import json
from importlib.util import find_spec
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from programs import alone, batch, loaded, lower, placed_inputs, program
from test_parallel import assert_close, loss_and_gradients
from test_torch_models import eager_loss, module_of, state_of
from torch_families import FAMILIES, imported

from graphtrain.config.schema import Batch, Mesh, PipelineSettings, TorchModel
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend import experts
from graphtrain.torch_frontend.load_balancing import LoadBalancing
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import check_parity, unstack_weights
from lowering.trees import flatten
from sharding_rules.errors import ShardingError

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def mixture(folder, kind="mixtral", **settings) -> TorchModel:
    return imported(folder, kind, overrides=BALANCED, **settings)


@pytest.mark.parametrize("kind", ["mixtral", "olmoe"])
def test_the_balance_loss_is_that_of_transformers(kind, tmp_path):
    found = check_parity(mixture(tmp_path, kind))
    assert found.loss < 1e-6 and found.gradient < 1e-5


def test_loads_are_means_over_the_layers():
    shares, probs = np.array([[1.5, 0.5], [1.0, 1.0]]), np.array([[0.7, 0.3], [0.4, 0.6]])
    balance = LoadBalancing(0.5, per_token=2, router=torch.nn.Module, index=0)
    terms = balance.terms([(jnp.asarray(shares), jnp.asarray(probs))])
    loss = 2 * (1.25 * 0.55 + 0.75 * 0.45)
    assert {name: float(value) for name, value in terms.metrics.items()} == pytest.approx(
        {"balance_loss": loss, "expert_load_max": 1.25, "expert_load_min": 0.75}
    )
    assert float(terms.losses["balance_loss"]) == pytest.approx(0.5 * loss)
    assert terms.metrics.keys() == set(balance.metric_names)


def test_experts_over_devices_have_the_gradients_of_one_that_computes_all(tmp_path):
    of = program(
        target="cpu:8",
        mesh=Mesh(data=2, expert=2, tensor=2),
        model=mixture(tmp_path),
        batch=Batch(global_batch_size=8, seq_len=8),
    )
    want = loss_and_gradients(alone(of))
    with mock.patch.object(experts, "computes_active_experts", lambda *sizes: True):  # as on a TPU
        assert_close(loss_and_gradients(of), want)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_on_a_cpu_tokens_are_multiplied_by_their_experts_alone(kind, tmp_path):
    """gpt-oss has biases and a gate of its own. FLOP are the compiled program's own count."""
    experts_count, chosen, embed, mlp = 8, 2, 32, 48
    config = FAMILIES["mixtral"] | {"num_hidden_layers": 1, "num_local_experts": experts_count}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"model_type": kind, "head_dim": 8}))
    of = program(
        target="cpu:2",
        mesh=Mesh(data=2),
        model=TorchModel(hf=str(path), dtype="float32", remat="none"),
        batch=Batch(global_batch_size=64, seq_len=32),
    )
    step, module, inputs = loaded(of, "gradients"), module_of(of), batch(of)
    eager_loss(module, inputs).backward()
    state = placed_inputs(step, "state", state_of(of, module))
    got = step(state, placed_inputs(step, "batch", inputs))["gradients"]
    found = unstack_weights(open_model(of.model), flatten(jax.device_get(got)))
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), atol=1e-6, err_msg=name)
    flops = step.record["flops"]
    with mock.patch.object(experts, "computes_active_experts", lambda *sizes: False):
        # Another program, as those that are loaded are kept; the attention is the same.
        other = dataclasses.replace(of, model=dataclasses.replace(of.model, attention="dense"))
        of_all = loaded(other, "gradients").record["flops"]
    of_expert = 3 * 2 * (64 * 32 // 2) * 3 * embed * mlp  # of all tokens of a device
    others = of_all - experts_count * of_expert
    assert flops - others <= 1.25 * chosen * of_expert


def test_what_balances_all_tokens_at_once_is_refused_in_parts(tmp_path):
    model = mixture(tmp_path)
    last = Batch(global_batch_size=8, seq_len=8, gradient_reduction="per_step")
    of = program(target="cpu:8", mesh=Mesh(data=8), rules=("data",), model=model, batch=last)
    with pytest.raises(
        ShardingError,
        match="output_router_logits balances experts over the tokens of all replicas; use",
    ):
        loaded(of, "train")
    size = Batch(global_batch_size=8, seq_len=8, microbatches=2)
    of = program(target="cpu:8", mesh=Mesh(data=4, stage=2), model=model, batch=size)
    with pytest.raises(
        ShardingError, match="output_router_logits balances experts over all blocks"
    ):
        lower(dataclasses.replace(of, pipeline=PipelineSettings(schedule="gpipe")), "train")
    with pytest.raises(ImportedModelError, match="its router modules are unknown"):
        check_parity(mixture(tmp_path, "llama"))


@pytest.mark.skipif(not find_spec("libtpu"), reason="no libtpu")
def test_on_a_tpu_tokens_are_multiplied_by_their_experts_alone(tmp_path):
    size = Batch(global_batch_size=8, seq_len=16)
    model = imported(tmp_path, "mixtral", dtype="bfloat16")
    of = program(target="v5e:2x2", mesh=Mesh(expert=2, data=2), model=model, batch=size)
    lowered = lower(of, "evaluate")
    assert lowered.text.count('"chlo.ragged_dot"') == 3
    assert "all_gather" in lowered.text and "reduce_scatter" in lowered.text
