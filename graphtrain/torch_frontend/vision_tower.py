"""Vision towers of transformers, prepared for a trace in which the sizes of images are known."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from graphtrain.torch_frontend import segmented_attention


def prepare_tower(model: Any) -> None:
    """Let a tower that takes grids of images attend in segments, its blocks told apart.

    Blocks with the same weights attend to windows or to all of an image, by the arguments that the
    tower gives them. As attributes, the kinds are known before the tower is called.
    """
    vision = model.config.vision_config
    for tower in model.modules():
        is_tower = getattr(tower, "config", None) is vision
        if is_tower and "grid_thw" in inspect.signature(tower.forward).parameters:
            segmented_attention.register()
            vision._attn_implementation = segmented_attention.IMPLEMENTATION
            _mark_full_attention(tower, getattr(vision, "fullatt_block_indexes", None))


def _mark_full_attention(tower: torch.nn.Module, numbers: list[int] | None) -> None:
    blocks = getattr(tower, "blocks", None)
    if numbers is not None and isinstance(blocks, torch.nn.ModuleList):
        for number, block in enumerate(blocks):
            block.attends_to_windows = number not in numbers  # pyright: ignore[reportArgumentType]
