"""Experts, and adapters of languages, compute what transformers does without their loop."""

import jax.numpy as jnp
import pytest
import torch
import transformers

from graphtrain.config.schema import TorchModel
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.bridge import TraceEnvironment
from graphtrain.torch_frontend.describe import describe
from graphtrain.torch_frontend.expert_loops import replace_loops, restore_loops
from graphtrain.torch_frontend.traced_calls import call_module

CONFIGS = {
    "dbrx": transformers.DbrxConfig(
        d_model=8, n_heads=2, n_layers=1, vocab_size=32,
        attn_config={"rope_theta": 1e4, "kv_n_heads": 1, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "longcat_flash": transformers.LongcatFlashConfig(
        vocab_size=32, hidden_size=8, ffn_hidden_size=12, expert_ffn_hidden_size=12, num_layers=1,
        num_attention_heads=2, head_dim=4, q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=4,
        qk_rope_head_dim=4, v_head_dim=4, moe_topk=3, n_routed_experts=3, zero_expert_num=2,
    ),
    "jetmoe": transformers.JetMoeConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=1, kv_channels=4,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    ),
    "xmod": transformers.XmodConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, languages=["de_DE", "en_XX"], default_language="en_XX",
        is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_gradients_are_those_of_the_loop(family):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    tokens = torch.randint(0, 32, (2, 6))

    def logits_and_gradients():
        model.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.square().sum().backward()
        gradients = {name: one.grad for name, one in model.named_parameters()}
        return logits.detach(), gradients

    replace_loops(model)
    assert any("forward" in vars(module) for module in model.modules())
    logits, gradients = logits_and_gradients()
    restore_loops(model)
    assert not any("forward" in vars(module) for module in model.modules())
    expected_logits, expected = logits_and_gradients()
    tolerance = {"rtol": 1e-4, "atol": 1e-5}  # norms and routers compute in float32
    torch.testing.assert_close(logits, expected_logits, **tolerance)
    torch.testing.assert_close(gradients, expected, **tolerance)


def test_a_plan_says_why_all_experts_are_computed(tmp_path):
    CONFIGS["jetmoe"].save_pretrained(tmp_path)
    model = TorchModel(hf=str(tmp_path), vocab=32, dtype="float32", remat="none")
    (line,) = (one for one in describe(model, tmp_path, None) if one.startswith("experts: "))
    assert "all of them are computed for each token, because JetMoeParallelExperts" in line


def test_shapes_that_do_not_match_are_said(tmp_path):
    class Wrong(torch.nn.Module):
        def forward(self, x):
            return x + x[:, :2]

    environment = TraceEnvironment()
    with pytest.raises(ImportedModelError, match=r"incompatible shapes for broadcasting: \(2, 3\)"):
        call_module(
            *(module := Wrong(), environment, {}, {}, None),
            lambda: module(*environment.wrap([jnp.ones((2, 3))])),
        )
