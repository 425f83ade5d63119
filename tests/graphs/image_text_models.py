"""Programs of tiny models of text and images, their batches, and what transformers takes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from image_text_folders import SIZES, folder_of
from programs import batch, program

from graphtrain.config.hf_images import image_layout
from graphtrain.config.schema import Batch, Program, TorchModel
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.open_module import open_model


def program_of(kind: str, directory: Path, images: int = 2, **settings: Any) -> Program:
    """A program of the folder in float32, on one device unless settings say otherwise."""
    model = TorchModel(
        hf=str(folder_of(kind, directory)),
        dtype="float32",
        images=images,
        image_size=SIZES[kind],
        axes=settings.pop("axes", {}),
    )
    sizes = Batch(global_batch_size=8, seq_len=40)
    return program(**{"model": model, "batch": sizes, "target": "cpu:1"} | settings)


def opened_of(of: Program) -> OpenedModel:
    assert isinstance(of.model, TorchModel)
    return open_model(of.model)


def module_of(of: Program) -> Any:
    model: Any = of.model
    return transformers.AutoModelForImageTextToText.from_pretrained(
        model.hf, dtype=torch.float32, attn_implementation="eager"
    )


def batch_of(of: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens with 0, 1, 2, 0, ... images in a row, which begin where they happen to."""
    layout = image_layout(of.model)  # pyright: ignore[reportArgumentType]
    assert layout is not None
    made, random = batch(of, seed), np.random.default_rng(seed)
    tokens = made["tokens"]
    tokens[tokens == layout.token] = 0
    rows = tokens.reshape(-1, tokens.shape[-1])
    for number, row in enumerate(rows):
        count = number % (layout.images + 1)
        free = len(row) - count * layout.tokens
        # Text between two images: they may be neighbours nowhere in Qwen2.5-VL's template.
        starts = np.sort(random.choice(free // 2, count, replace=False)) * 2
        for index, start in enumerate(starts):
            begin = start + index * layout.tokens
            row[begin : begin + layout.tokens] = layout.token
    made["weights"] *= made["targets"] != layout.token
    shape = (*tokens.shape[:-1], layout.images, layout.height, layout.width, 3)
    images = random.integers(0, 256, shape, np.uint8)
    counts = np.arange(len(rows)).reshape(tokens.shape[:-1]) % (layout.images + 1)
    used = np.arange(layout.images) < counts[..., None]
    return made | {"images": images * used[..., None, None, None].astype(np.uint8)}


def eager_inputs(of: Program, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """What transformers' own model takes, made by the folder's image processor."""
    model: Any = of.model
    layout = image_layout(model)
    assert layout is not None
    tokens = torch.tensor(inputs["tokens"].reshape(-1, inputs["tokens"].shape[-1])).long()
    images = inputs["images"].reshape(len(tokens), *inputs["images"].shape[-4:])
    is_image = tokens == layout.token
    counts = (is_image.sum(1) // layout.tokens).tolist()
    used = [image for row, count in zip(images, counts, strict=True) for image in row[:count]]
    processor = transformers.AutoImageProcessor.from_pretrained(model.hf, backend="pil")
    made = processor(images=used, do_resize=False, do_center_crop=False, return_tensors="pt")
    arguments = {"input_ids": tokens, **made}
    if "image_grid_thw" in made:
        arguments["mm_token_type_ids"] = is_image.int()
    return arguments
