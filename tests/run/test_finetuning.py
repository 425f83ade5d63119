"""An adapter through the real commands: trained, resumed, merged, and handed to peft and back."""

import json
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from test_weights import reference_loss

from graphtrain.checkpoints.arrays import restore_array
from graphtrain.config import load_config
from graphtrain.models.lora.trainable import trained_arrays
from graphtrain.weights.digests import record_weights

ADAPTER = """
[program.adapter]
rank = 4
alpha = 8.0
modules_to_save = ["final_norm/*"]
"""
FOUR = [
    "--target", "cpu:4", "--set", "program.mesh.data=1", "--set", "program.mesh.fsdp=2",
    "--set", "program.mesh.tensor=2", "--set", "run.directory=four",
]  # fmt: skip

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


def configure_adapter(place) -> None:
    """Write a small Llama with random weights, and make config.toml train an adapter of it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
    settings = transformers.LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, initializer_range=0.2)
    transformers.LlamaForCausalLM(settings).save_pretrained(place.path / "source")
    place.command("convert", "hf-to-graphtrain", "source", "ours")
    config = place.path / "config.toml"
    text = config.read_text().replace("steps = 16", 'steps = 8\ninit_from = "ours"')
    config.write_text(text.replace("warmup_steps = 2", 'schedule = "constant"') + ADAPTER)


@pytest.mark.usefixtures("compiled_quickly")
def test_an_adapter_is_trained_resumed_and_exported(cold):
    configure_adapter(cold)
    config = cold.path / "config.toml"

    cold.command("compile", "config.toml")
    cold.command("compile", "config.toml", *FOUR)
    out, _ = cold.command("run", "config.toml", "--set", "run.export=peft")
    assert "exported to run/peft-8\n" in out
    cold.command("run", "config.toml", *FOUR, "--set", "run.steps=4")
    cold.command("run", "config.toml", *FOUR)
    for path in trained_arrays(load_config(config).program):
        one, four = (
            restore_array(cold.path / name / "checkpoints", 8, f"parameters/{path}")
            for name in ("run", "four")
        )
        np.testing.assert_allclose(four, one, rtol=0, atol=1e-5 * np.abs(one).max(), err_msg=path)
    saved = json.loads((cold.path / "run/checkpoints/8/about/metadata").read_text())["arrays"]
    trained = {f"parameters/{path}" for path in trained_arrays(load_config(config).program)}
    assert {path for path in saved if path.startswith("parameters/")} == trained
    assert not [path for path in saved if "embedding" in path]

    cold.command("convert", "graphtrain-to-hf", "run", "merged")
    cold.command("convert", "graphtrain-to-hf", "run", "adapter", "--adapter")
    for path in (cold.path / "adapter").iterdir():
        assert path.read_bytes() == (cold.path / "run/peft-8" / path.name).read_bytes()
    merged = transformers.AutoModelForCausalLM.from_pretrained(cold.path / "merged")
    validation = cold.journal()[-1]["validation_loss"]
    data = cold.path / "data/validation"
    assert reference_loss(merged, data, 264) == pytest.approx(validation, rel=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(cold.path / "source")
    tuned = peft.PeftModel.from_pretrained(base, cold.path / "adapter")
    with torch.no_grad():
        tokens = torch.arange(64)[None]
        torch.testing.assert_close(tuned(tokens).logits, merged(tokens).logits, rtol=0, atol=1e-5)

    given = ["--set", "run.directory=new", "--set", "run.init_adapter_from=adapter"]
    out, _ = cold.command("evaluate", "config.toml", *given, "--json")
    assert json.loads(out)["validation_loss"] == pytest.approx(validation, rel=1e-5)

    # Another base is noticed, also where it has the same shapes.
    file = cold.path / "ours/weights/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    _, err = cold.command("run", "config.toml", "--set", "run.steps=9", status=2)
    assert "ours is damaged: weights/model.safetensors" in err
    record_weights(cold.path / "ours")
    for words in (["run", "config.toml", "--set", "run.steps=9"],
                  ["convert", "graphtrain-to-hf", "run", "again"]):  # fmt: skip
        _, err = cold.command(*words, status=2)
        assert "weights/model.safetensors differs" in err
    shutil.rmtree(cold.path / "ours")
    _, err = cold.command("convert", "graphtrain-to-hf", "run", "again", status=2)
    assert "ours is neither a converted folder" in err


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("base", ["float32", "int8", "nf4"])
def test_a_run_with_an_adapter_generates_what_its_merged_model_does(base, cold):
    configure_adapter(cold)
    with (cold.path / "config.toml").open("a") as file:
        file.write(f'base_dtype = "{base}"\n')
    cold.command("compile", "config.toml")
    cold.command("run", "config.toml")
    prefill = ["--set", "program.serve.prefill=[32]"]
    greedy = ["--tokens", "16", "--temperature", "0", "--json"]
    out, _ = cold.command("generate", "config.toml", "It was", *greedy, *prefill)
    generated = json.loads(out)
    cold.command("convert", "graphtrain-to-hf", "run", "merged")
    texts = []
    for folder in ("merged", "source"):
        model = transformers.AutoModelForCausalLM.from_pretrained(cold.path / folder)
        model.generation_config.eos_token_id = None
        made = model.generate(
            torch.tensor([generated["prompt"]]), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        texts.append(made[0].tolist())
    assert texts[0] == generated["prompt"] + generated["tokens"]
    assert texts[0] != texts[1]  # without the adapter, the text is another


def test_an_adapter_needs_weights_to_start_from(cold):
    config = cold.path / "config.toml"
    config.write_text(config.read_text() + ADAPTER)
    _, err = cold.command("plan", "config.toml", status=2)
    assert "program.adapter starts from existing weights; set run.init_from" in err
