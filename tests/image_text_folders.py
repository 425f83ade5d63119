"""Tiny models of text and images, as folders of transformers with random weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

KINDS = ("llava", "qwen2_5_vl")
SIZES = {"llava": None, "qwen2_5_vl": (24, 40)}  # two windows high, three wide, cut at the edges
_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 4}


def config_of(kind: str, vocab: int = 64, image_token: int = 60) -> Any:
    """The configuration of a model whose images have 12 x 12 pixels, or SIZES."""
    text = _TEXT | {"vocab_size": vocab}
    if kind == "llava":
        tower = {"num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 12}
        return transformers.LlavaConfig(
            vision_config={"model_type": "clip_vision_model"} | _VISION | tower,
            text_config={"model_type": "llama"} | text,
            image_token_index=image_token,
        )
    tower = {"depth": 4, "num_heads": 2, "out_hidden_size": 32, "window_size": 16}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    return transformers.Qwen2_5_VLConfig(
        vision_config=_VISION | tower | {"fullatt_block_indexes": [1, 3]},
        text_config=text | {"rope_parameters": rotary},
        image_token_id=image_token,
    )


def save_weights(config: Any, folder: Path) -> None:
    """Write config.json and random weights, of which none is exactly 0 or 1."""
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)


@cache
def folder_of(kind: str, directory: Path) -> Path:
    """A folder with weights and the file of an image processor."""
    folder = directory / kind
    save_weights(config_of(kind), folder)
    if kind == "llava":
        processor: Any = transformers.CLIPImageProcessor()
    else:
        processor = transformers.Qwen2VLImageProcessor(patch_size=4)
    processor.save_pretrained(folder)
    return folder
