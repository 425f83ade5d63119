"""Adapters of models of text and images through the real commands: to peft and back."""

import json
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from places import Place
from safetensors.numpy import load_file
from test_image_text_commands import CONFIG, loss_of, write_model

ADAPTER = """
[program.adapter]
rank = 4
alpha = 8.0
"""

# Of peft and transformers to each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


def merge(model, folder, source) -> None:
    """Write the merged weights of a model of peft, and the image processor of the source."""
    model.merge_and_unload().save_pretrained(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, folder / name)


def write_new_adapter(base, folder):
    """Write an adapter of peft's own choice of layers; those that nothing reads are not trained."""
    torch.manual_seed(0)
    targets = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = peft.get_peft_model(base, targets)
    idle = "vision_tower.encoder.layers.3."
    assert any(idle in name and "lora_B" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_B" in name and idle not in name:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return model


@pytest.mark.usefixtures("compiled_quickly")
def test_an_adapter_is_trained_on_images_and_exported_for_peft(tmp_path):
    place, size = Place(tmp_path, tmp_path / "cache"), write_model("llava", tmp_path)
    words = "chats.jsonl", "--processor", "folder", "--image-size", *size.split(", ")
    place.command("data", "instruct", *words, "--validation", "0", "--output", "data")
    config = CONFIG.replace("SIZE", size).replace("1e-3", "1e-2") + ADAPTER
    (tmp_path / "config.toml").write_text(config)
    place.command("compile", "config.toml")
    place.command("run", "config.toml", "--set", "run.export=peft")
    place.command("convert", "graphtrain-to-hf", "run", "merged")
    loss, data = place.journal()[-1]["validation_loss"], tmp_path / "data/train"
    assert loss_of(tmp_path / "folder", data) > loss + 1e-3

    kind, folder = transformers.AutoModelForImageTextToText, tmp_path / "folder"
    tuned = peft.PeftModel.from_pretrained(kind.from_pretrained(folder), tmp_path / "run/peft-2")
    merge(tuned, tmp_path / "tuned", folder)
    assert loss_of(tmp_path / "tuned", data) == pytest.approx(loss, rel=1e-5)
    merged = load_file(tmp_path / "merged/model.safetensors")
    for name, array in load_file(tmp_path / "tuned/model.safetensors").items():
        np.testing.assert_allclose(merged[name], array, atol=1e-6, err_msg=name)

    merge(write_new_adapter(kind.from_pretrained(folder), tmp_path / "new"), tmp_path / "b", folder)
    given = ["--set", "run.directory=other", "--set", "run.init_adapter_from=new"]
    out, _ = place.command("evaluate", "config.toml", *given, "--json")
    expected = loss_of(tmp_path / "b", data)
    assert json.loads(out)["validation_loss"] == pytest.approx(expected, rel=1e-5)
