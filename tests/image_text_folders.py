"""Tiny models of text and images, as folders of transformers with random weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
_IMAGE_TOKEN = 60


def _llava() -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "image_size": 15,
            "patch_size": 5,
        },
        text_config={"model_type": "llama"} | _TEXT,
        image_token_index=_IMAGE_TOKEN,
    )
    size = {"height": 15, "width": 15}
    return config, transformers.CLIPImageProcessor(size=size, crop_size=size)


def _qwen() -> tuple[Any, Any]:
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={
            "depth": 4,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1, 3],
        },
        text_config=_TEXT | {"rope_parameters": rotary},
        image_token_id=_IMAGE_TOKEN,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    # The smallest and the largest number of pixels of an image.
    size = {"shortest_edge": 64, "longest_edge": 4096}
    return config, transformers.Qwen2VLImageProcessor(patch_size=4, size=size)


MAKERS = {"llava": _llava, "qwen2_5_vl": _qwen}
SIZES = {"llava": None, "qwen2_5_vl": (24, 40)}  # two windows high, three wide, cut at the edges


@cache
def folder_of(kind: str, directory: Path) -> Path:
    """A folder with weights and the files of the image processor."""
    config, processor = MAKERS[kind]()
    folder = directory / kind
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
