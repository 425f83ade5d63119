"""Adapters and DPO of models of transformers through the real commands, to peft and back."""

import json

import peft
import pytest
import torch
import transformers
from quantized_folders import quantize
from safetensors.torch import load_file, save_file
from test_torch import configure
from test_weights import reference_loss

ADAPTER = """
[program.adapter]
rank = 4
alpha = 8.0
target_modules = ["q_proj", "experts/*"]
modules_to_save = ["lm_head"]
"""
STAGES = [
    "--target", "cpu:4", "--set", "program.mesh.fsdp=2", "--set", "program.mesh.stage=2",
    "--set", "program.mesh.data=1", "--set", "program.batch.microbatches=2",
]  # fmt: skip
TENSOR = ["--target", "cpu:2", "--set", "program.mesh.data=1", "--set", "program.mesh.tensor=2"]

# Of peft and transformers to each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


def configure_mixture(place, tables: str, padding: int = 0, **more) -> None:
    """Write a small mixture with random weights, and make config.toml train from it.

    Of the 264 rows of its vocabulary in a program, the last ones may be padding.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 264 - padding}
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2}
    settings = transformers.MixtralConfig(
        **sizes, **heads, **mixture, **more, initializer_range=0.2
    )
    transformers.MixtralForCausalLM(settings).save_pretrained(place.path / "source")
    configure(place, 'hf = "source"' + (f"\nvocab_padding = {padding}" if padding else ""))
    config = place.path / "config.toml"
    text = config.read_text().replace("steps = 16", 'steps = 4\ninit_from = "source"')
    config.write_text(text.replace("warmup_steps = 2", 'schedule = "constant"') + tables)


@pytest.mark.usefixtures("compiled_quickly")
def test_an_adapter_is_trained_on_a_folder_in_mxfp4_and_merged(cold):
    torch.manual_seed(0)
    settings = transformers.GptOssConfig(
        vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        dtype="bfloat16",
    )  # fmt: skip
    source = transformers.AutoModelForCausalLM.from_config(settings)
    source.save_pretrained(cold.path / "source")
    quantize(cold.path / "source", "mxfp4")
    configure(cold, 'hf = "source"')
    config = cold.path / "config.toml"
    text = config.read_text().replace("steps = 16", 'steps = 2\ninit_from = "source"')
    config.write_text(text + ADAPTER)
    devices = ["--target", "cpu:2", "--set", "program.mesh.fsdp=2", "--set", "program.mesh.data=1"]
    cold.command("compile", "config.toml", *devices)
    out, _ = cold.command("evaluate", "config.toml", *devices, "--json")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        cold.path / "source", quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    want = reference_loss(loaded.float(), cold.path / "data/validation", 264)
    assert json.loads(out)["validation_loss"] == pytest.approx(want, rel=1e-5)

    cold.command("run", "config.toml", *devices)
    cold.command("convert", "graphtrain-to-hf", "run", "merged")
    assert "quantization_config" not in json.loads((cold.path / "merged/config.json").read_text())
    merged = transformers.AutoModelForCausalLM.from_pretrained(cold.path / "merged")
    last = reference_loss(merged, cold.path / "data/validation", 264)
    assert last == pytest.approx(cold.journal()[-1]["validation_loss"], rel=1e-5)
    assert last != pytest.approx(want, rel=1e-4)


@pytest.mark.usefixtures("compiled_quickly")
def test_an_adapter_of_experts_is_trained_in_stages_resharded_and_exported(cold):
    embeddings = ADAPTER.replace("lm_head", "embed_tokens")
    configure_mixture(cold, embeddings, padding=7, tie_word_embeddings=True)
    cold.command("compile", "config.toml", *STAGES)
    cold.command("run", "config.toml", *STAGES, "--set", "run.steps=2")
    cold.command("compile", "config.toml", *TENSOR)
    out, _ = cold.command("run", "config.toml", *TENSOR, "--set", "run.export=peft")
    assert "exported to run/peft-4\n" in out
    validation = cold.journal()[-1]["validation_loss"]

    cold.command("convert", "graphtrain-to-hf", "run", "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(cold.path / "merged")
    data = cold.path / "data/validation"
    assert reference_loss(merged, data, 257) == pytest.approx(validation, rel=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(cold.path / "source")
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        before = base(tokens).logits
        tuned = peft.PeftModel.from_pretrained(base, cold.path / "run/peft-4")
        torch.testing.assert_close(tuned(tokens).logits, merged(tokens).logits, rtol=0, atol=1e-5)
        assert (tuned(tokens).logits - before).abs().max() > 1e-3

    tuned.save_pretrained(cold.path / "theirs")
    stronger(cold.path / "theirs")
    given = ["--set", "run.directory=new", "--set", "run.init_adapter_from=theirs"]
    out, _ = cold.command("evaluate", "config.toml", *STAGES, *given, "--json")
    assert json.loads(out)["validation_loss"] == pytest.approx(validation, rel=1e-5)

    _, err = cold.command("generate", "config.toml", "It was", status=2)
    assert "program.adapter of model.hf or model.torch cannot be merged for generation" in err


def stronger(folder) -> None:
    """Give the experts' first parameter twice the strength, by half as large factors."""
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alpha_pattern"] = {"mlp.experts.gate_up_proj": 2 * config["lora_alpha"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    halved = [name for name in tensors if name.endswith("experts.base_layer.lora_B.weight")]
    assert len(halved) == 2
    save_file(
        {name: each / 2 if name in halved else each for name, each in tensors.items()},
        folder / "adapter_model.safetensors",
    )


@pytest.mark.usefixtures("compiled_quickly")
def test_a_quantized_base_is_merged_as_the_run_trained_with_it(cold):
    configure_mixture(cold, ADAPTER + 'base_dtype = "nf4"\n')
    cold.command("compile", "config.toml", *TENSOR)
    cold.command("run", "config.toml", *TENSOR, "--set", "run.steps=2")
    cold.command("convert", "graphtrain-to-hf", "run", "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(cold.path / "merged")
    loss = reference_loss(merged, cold.path / "data/validation", 264)
    assert loss == pytest.approx(cold.journal()[-1]["validation_loss"], rel=1e-5)
