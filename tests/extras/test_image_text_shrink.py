"""Small models for the parity check of models of text and images."""

import json

import pytest
import torch
import transformers

from graphtrain.config.schema import TorchModel
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.image_text import ImageInputs
from graphtrain.torch_frontend.meta_module import build_on_meta
from graphtrain.torch_frontend.module_factory import factory
from graphtrain.torch_frontend.shrink import shrink_model

VOCAB = 151_936  # so that the model is too large to be compared as it is
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "patch_size": 4, "depth": 8, "num_heads": 4,
    "out_hidden_size": 256, "window_size": 16, "fullatt_block_indexes": [3, 7],
}  # fmt: skip
MROPE = {"type": "mrope", "mrope_section": [8, 12, 12]}  # half of a head


def write_qwen(folder, *, flat: bool) -> TorchModel:
    """A Qwen2.5-VL as published, with the settings of its text beside the others, or as saved."""
    text = TEXT | ({"rope_scaling": MROPE} if flat else {"rope_parameters": MROPE})
    parts = text if flat else {"text_config": text}
    config = {"model_type": "qwen2_5_vl", "vision_config": VISION, "image_token_id": 7} | parts
    processor = transformers.Qwen2VLImageProcessor(patch_size=4)
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return TorchModel(hf=str(folder), images=1, image_size=(24, 40))


def config_of(model: TorchModel):
    module = build_on_meta(factory(model)).module
    assert isinstance(module, torch.nn.Module)
    return module.config


@pytest.mark.parametrize("flat", [True, False])
def test_the_small_model_has_the_settings_of_the_folder(tmp_path, flat):
    model = write_qwen(tmp_path, flat=flat)
    assert config_of(model).text_config.vocab_size == VOCAB
    small, overrides = shrink_model(model)
    text = config_of(small).text_config
    assert (text.vocab_size, text.rms_norm_eps) == (VOCAB, 1e-6)
    assert text.hidden_size < 256 and text.num_hidden_layers == 2
    head_dim = text.hidden_size // text.num_attention_heads
    assert sum(text.rope_parameters["mrope_section"]) == head_dim // 2
    assert ("text_config" in overrides) is not flat


def test_overrides_of_a_part_and_of_the_comparison_are_kept(tmp_path):
    model = write_qwen(tmp_path, flat=False)
    given = TorchModel(
        hf=model.hf,
        images=1,
        image_size=(24, 40),
        overrides={"text_config": {"rms_norm_eps": 1e-4}},
        parity={"text_config": {"intermediate_size": 64}},
    )
    text = config_of(shrink_model(given)[0]).text_config
    assert (text.rms_norm_eps, text.intermediate_size) == (1e-4, 64) and text.hidden_size < 256


def test_a_model_that_attends_by_kinds_of_tokens_is_refused(tmp_path):
    model = write_qwen(tmp_path, flat=False)

    class PaliGemma(torch.nn.Module):
        def forward(self, input_ids, token_type_ids=None):
            raise NotImplementedError

    with pytest.raises(ImportedModelError, match="PaliGemma attends by token_type_ids"):
        ImageInputs.of(model, PaliGemma())
