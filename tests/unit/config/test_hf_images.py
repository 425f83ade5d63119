"""Images of a Hugging Face folder, and the settings for them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from graphtrain.config.hf_config import with_vocab_size
from graphtrain.config.hf_images import Normalization, image_layout, read_normalization
from graphtrain.config.schema import Batch, Loss, Mesh, Program, TorchModel
from graphtrain.errors import ImportedModelError

LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 60,
    "text_config": {"vocab_size": 64, "num_hidden_layers": 2},
    "vision_config": {"image_size": 28, "patch_size": 7},
}
QWEN: dict[str, Any] = LLAVA | {
    "model_type": "qwen2_5_vl",
    "vision_config": {"patch_size": 4, "spatial_merge_size": 2},
}
PER_STEP = Batch(global_batch_size=4, seq_len=64, gradient_reduction="per_step")
CLIP = {"do_rescale": True, "rescale_factor": 0.5, "image_mean": [1, 2, 3], "image_std": [4, 5, 6]}


def write(folder, config: dict[str, Any], processor: dict[str, Any] | None = None) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def test_the_layout_is_that_of_llava_or_of_a_tower_that_merges_patches(tmp_path):
    model = TorchModel(hf=write(tmp_path, LLAVA), images=2)
    layout = image_layout(model)
    assert model.image_size == (28, 28)
    assert layout is not None
    assert (layout.token, layout.tokens, layout.grid) == (60, 16, (4, 4))
    with_class = {"vision_feature_select_strategy": "full"}
    layout = image_layout(replace(model, overrides=with_class))
    assert layout is not None and layout.tokens == 17
    without_class = with_class | {"vision_config": {"model_type": "siglip_vision_model"}}
    layout = image_layout(replace(model, overrides=without_class))
    assert layout is not None and layout.tokens == 16
    write(tmp_path, QWEN)
    layout = image_layout(TorchModel(hf=str(tmp_path), images=1, image_size=(16, 24)))
    assert layout is not None and (layout.tokens, layout.grid) == (6, (2, 3))
    assert image_layout(TorchModel(hf=str(tmp_path))) is None


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (QWEN, {}, "image_size = "),
        (QWEN, {"image_size": (16, 20)}, "use multiples of 8"),
        (LLAVA, {"images": 0, "image_size": (28, 28)}, "images is 0"),
        (LLAVA, {"front_end": "strict"}, 'images cannot be used with front_end = "strict"'),
        (LLAVA | {"vision_config": None}, {}, "has no vision_config"),
        (LLAVA | {"image_token_index": None}, {}, "has no image_token_id"),
        (LLAVA | {"vision_config": {"image_size": 28}}, {}, "has no patch_size"),
    ],
)
def test_settings_with_which_a_model_takes_no_images_are_refused(tmp_path, config, settings, words):
    with pytest.raises(ValueError, match=words):
        TorchModel(**{"hf": write(tmp_path, config), "images": 1} | settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"mesh": Mesh(stage=2)}, "mesh.stage"),
        ({"mesh": Mesh(context=2)}, "mesh.context"),
        ({"loss": Loss(kind="dpo")}, 'loss.kind = "dpo"'),
        ({"batch": PER_STEP}, "per_step"),
    ],
)
def test_programs_that_take_no_images_name_the_setting(tmp_path, settings, name):
    model = TorchModel(hf=write(tmp_path, LLAVA), images=1)
    plain = {"model": model, "mesh": Mesh(), "batch": Batch(global_batch_size=4, seq_len=64)}
    with pytest.raises(ValueError, match=f"model.images cannot be used with .*{name}"):
        Program(**plain | settings)


def test_pixels_are_normalized_as_the_processors_files_say(tmp_path):
    folder = write(tmp_path, LLAVA, CLIP)
    assert read_normalization(folder) == Normalization(0.5, (1, 2, 3), (4, 5, 6))
    write(tmp_path, LLAVA, CLIP | {"do_normalize": False})
    assert read_normalization(folder) == Normalization(0.5, (0, 0, 0), (1, 1, 1))
    write(tmp_path, LLAVA, {"do_rescale": False})
    with pytest.raises(ImportedModelError, match="does not state how pixels are normalized"):
        read_normalization(folder)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ImportedModelError, match=r"has no preprocessor_config\.json"):
        read_normalization(folder)
    nested = json.dumps({"image_processor": CLIP})
    (tmp_path / "processor_config.json").write_text(nested)
    assert read_normalization(folder) == Normalization(0.5, (1, 2, 3), (4, 5, 6))
    # As transformers, which reads the older file only where the newer one has no images.
    write(tmp_path, LLAVA, CLIP | {"rescale_factor": 0.25})
    assert read_normalization(folder).rescale_factor == 0.5
    (tmp_path / "processor_config.json").write_text('{"patch_size": 7}')
    assert read_normalization(folder).rescale_factor == 0.25


def test_a_part_that_the_file_does_not_have_is_not_overridden(tmp_path):
    flat = {name: value for name, value in QWEN.items() if name != "text_config"}
    folder = write(tmp_path, flat | {"vocab_size": 64, "hidden_size": 32})
    overrides: Any = {"text_config": {"rms_norm_eps": 1e-6}}
    with pytest.raises(ValueError, match="without text_config; override them there"):
        TorchModel(hf=folder, images=1, image_size=(16, 24), overrides=overrides)


def test_overrides_of_a_part_replace_only_what_they_name(tmp_path):
    overrides: Any = {"vision_config": {"image_size": 14}}
    model = TorchModel(hf=write(tmp_path, LLAVA), images=1, overrides=overrides)
    layout = image_layout(model)
    assert layout is not None and (layout.height, layout.tokens) == (14, 4)


def test_another_vocabulary_is_set_in_every_part_that_states_one():
    both = LLAVA | {"vocab_size": 64}
    changed = with_vocab_size(both, 72)
    assert changed["vocab_size"] == changed["text_config"]["vocab_size"] == 72
    assert both["text_config"]["vocab_size"] == 64
    assert "vocab_size" not in with_vocab_size(LLAVA, 72)
    assert with_vocab_size({"vocab_size": 64, "pad_token_id": -1}, 72)["pad_token_id"] == 63
