"""Settings of the native decoder that contradict each other are refused, with what to change."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from graphtrain.config import load_config
from graphtrain.config.render import render
from graphtrain.config.schema import (
    Adapter,
    Batch,
    Config,
    Data,
    LatentAttention,
    Loss,
    Mesh,
    MixtureOfExperts,
    Model,
    Optimizer,
    PipelineSettings,
    Precision,
    Program,
    Run,
)
from graphtrain.errors import ConfigError

LATENT = LatentAttention(kv_lora_rank=16, qk_rope_head_dim=4, v_head_dim=6)
MOE = MixtureOfExperts(experts=4, dense_layers=1, dense_mlp=24)
BATCH = Batch(global_batch_size=1, seq_len=8)
SIZES = {"layers": 2, "embed": 32, "heads": 4, "mlp": 48, "vocab": 64}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dense_layers": 1}, "dense_layers and dense_mlp belong together"),
        ({"groups": 4}, "groups and groups_per_token belong together"),
        ({"groups": 3, "groups_per_token": 1}, "experts = 8 is not a multiple of groups = 3"),
        ({"groups": 8, "groups_per_token": 1}, "at least 2 experts in each"),
        ({"groups": 4, "groups_per_token": 5}, "must be at most groups = 4"),
        (
            {"groups": 4, "groups_per_token": 1, "experts_per_token": 3},
            "enough for experts_per_token = 3 experts",
        ),
    ],
)
def test_a_mixture_that_contradicts_itself_is_refused(settings, told):
    with pytest.raises(ValidationError, match=told):
        MixtureOfExperts(experts=8, **settings)


def test_an_average_of_weights_has_no_bias_that_a_step_updates():
    model = Model(**SIZES, moe=MixtureOfExperts(experts=4, bias_update_rate=0.001))
    with pytest.raises(ValidationError, match="or set bias_update_rate = 0"):
        Program(model=model, batch=BATCH, optimizer=Optimizer(kind="schedule_free"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"partial_rotary_factor": 0.4}, "rotates 3 of head_dim = 8 dimensions"),
        ({"partial_rotary_factor": 0.1}, "rotates 0 of head_dim = 8 dimensions"),
        ({"partial_rotary_factor": 1.5}, "less than or equal to 1"),
        (
            {"latent_attention": LATENT, "qk_norm": True, "bias": "qkv"},
            "latent_attention cannot be used with bias, qk_norm; remove it",
        ),
        (
            {"latent_attention": replace(LATENT, qk_rope_head_dim=8)},
            "qk_rope_head_dim = 8 is not below head_dim = 8",
        ),
        (
            {"latent_attention": replace(LATENT, qk_rope_head_dim=3)},
            "qk_rope_head_dim = 3 is odd",
        ),
        (
            {"moe": MOE, "sliding_window": 4, "global_attention_every": 2},
            "moe.dense_layers cannot be used with global_attention_every",
        ),
        (
            {"partial_rotary_factor": 0.5, "positions": "alibi"},
            'partial_rotary_factor is only for positions = "rope"; remove it',
        ),
    ],
)
def test_a_contradiction_is_refused(settings, told):
    with pytest.raises(ValidationError, match=told):
        Model(**SIZES, **settings)


def test_an_adapter_does_not_freeze_biases_that_the_settings_update(tmp_path):
    model = Model(**SIZES, moe=replace(MOE, bias_update_rate=0.001))
    told = r"bias_update_rate = 0.001 updates biases of routers, and \[program.adapter\] freezes"
    program = Program(model=model, batch=BATCH, adapter=Adapter(rank=4, alpha=8))
    run = Run(steps=1, directory=str(tmp_path), data=Data(train="data/train"), init_from="w")
    with pytest.raises(ConfigError, match=told):
        load_config(Config(program=program, run=run))
    with pytest.raises(ConfigError, match=told):
        load_config(render(Config(program=program, run=run)))
    updated = Adapter(rank=4, alpha=8, modules_to_save=("mlp/selection_bias",))
    load_config(Config(program=replace(program, adapter=updated), run=run))
    frozen = replace(model, moe=replace(MOE, bias_update_rate=0.0))
    load_config(Config(program=replace(program, model=frozen), run=run))


def test_a_saved_run_whose_adapter_froze_the_biases_is_still_read(tmp_path):
    """Before, the rate was ignored; the saved settings name the model of the checkpoints."""
    model = Model(**SIZES, moe=replace(MOE, bias_update_rate=0.001))
    program = Program(model=model, batch=BATCH, adapter=Adapter(rank=4, alpha=8))
    run = Run(steps=1, directory="elsewhere", data=Data(train="data/train"), init_from="w")
    (tmp_path / "config.toml").write_text(render(Config(program=program, run=run)))
    (tmp_path / "checkpoints").mkdir()
    with pytest.warns(UserWarning, match="the run froze the biases of routers"):
        assert load_config(tmp_path).program == program
    with pytest.raises(ConfigError, match="freezes them"):
        load_config(tmp_path, [f'run.directory="{tmp_path}/new"'])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.warns(UserWarning, match="the run froze the biases of routers"):
        assert load_config(tmp_path, ["run.steps=3"]).program == program


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"mesh": Mesh(stage=2), "pipeline": PipelineSettings(schedule="1f1b")},
            'pipeline.schedule = "1f1b": it divides the positions',
        ),
        (
            {
                "mesh": Mesh(stage=2, context=2),
                "batch": replace(BATCH, cross_document_attention=False),
            },
            "batch.cross_document_attention = false with mesh.stage and mesh.context",
        ),
        ({"loss": Loss(kind="dpo"), "batch": replace(BATCH, global_batch_size=2)}, "loss.kind"),
        ({"precision": Precision(compute="float16")}, "precision.compute"),
        (
            {"batch": replace(BATCH, gradient_reduction="per_step")},
            'batch.gradient_reduction = "per_step"',
        ),
    ],
)
def test_settings_without_further_tokens_are_named(settings, told):
    model = Model(**SIZES, mtp_loss_weight=0.3)
    with pytest.raises(ValidationError, match=f"mtp_loss_weight cannot be used with {told}"):
        Program(**{"model": model, "batch": BATCH} | settings)


def test_latents_have_no_product_in_8_bits():
    model = Model(**SIZES, latent_attention=LATENT)
    with pytest.raises(ValidationError, match="cannot be used with model\\.latent_attention"):
        Program(model=model, batch=BATCH, precision=Precision(compute="fp8"))
