"""Models of text and images of transformers: a vision tower in front of a language model.

The tower's features replace the embeddings of placeholders, row by row, because rows may be on
different devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from graphtrain.config.hf_images import (
    ImageLayout,
    Normalization,
    image_layout,
    read_normalization,
)
from graphtrain.errors import ImportedModelError
from graphtrain.models.attention.segment_mask import isolate_documents, segment_ids
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment
from graphtrain.torch_frontend.image_pixels import cut_into_patches, normalized_pixels
from graphtrain.torch_frontend.image_positions import image_positions
from lowering.tracing.constrain import constrain, unsplit

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """Inputs of a module of text and images, in place of token ids."""

    module: Any  # of transformers
    layout: ImageLayout
    normalization: Normalization

    @classmethod
    def of(cls, model: TorchModel, module: torch.nn.Module) -> ImageInputs | None:
        """Return the inputs of a module; None if program.model.images is 0.

        Raises:
            ImportedModelError: the files beside config.json, or the module, are not those of a
                model of text and images.
        """
        layout = image_layout(model)
        if layout is None:
            return None
        assert model.hf is not None
        if "token_type_ids" in inspect.signature(module.forward).parameters:
            raise ImportedModelError(
                f"program.model.images: {type(module).__name__} attends by token_type_ids, which "
                "programs with images do not have; this model is not supported with images"
            )
        return cls(module, layout, read_normalization(model.hf))

    @property
    def has_grid(self) -> bool:
        """Return whether the tower takes patches of images of any size, and their grids."""
        return "image_grid_thw" in inspect.signature(self.module.get_image_features).parameters

    @property
    def has_positions(self) -> bool:
        """Return whether tokens have positions in time, height and width."""
        return hasattr(self.module.base_model, "get_rope_index")

    def keyword_arguments(
        self,
        environment: TraceEnvironment,
        tokens: jax.Array,
        images: jax.Array,
        tower_arguments: Mapping[str, Any],
        position_ids: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the arguments of the module for tokens with images, traced.

        Args:
            environment: already entered.
            tokens: (batch, seq).
            images: (batch, images, height, width, 3), uint8.
            tower_arguments: as of `tower_arguments`, for these images.
            position_ids: the module's position_ids, if positions do not count up.

        Raises:
            ImportedModelError: the tower's features are not those of the placeholders.
        """
        arguments: dict[str, Any] = dict(position_ids)
        if self.has_positions:
            arguments["position_ids"] = Tensor(
                image_positions(tokens, self.layout, segment_ids()), environment
            )
        embeddings = self.module.get_input_embeddings()(Tensor(tokens, environment)).jax()
        features = self._features(environment, images, tower_arguments)
        merged = self._merged(tokens, embeddings, features)
        return arguments | {"inputs_embeds": Tensor(merged, environment)}

    def _merged(self, tokens: jax.Array, embeddings: jax.Array, features: jax.Array) -> jax.Array:
        """Return the embeddings, with the features of a row in place of its placeholders."""
        by_row = features.reshape(len(tokens), -1, features.shape[-1])
        rows = constrain(by_row, "batch", None, None)
        is_image = tokens == self.layout.token
        number = jnp.clip(jnp.cumsum(is_image, 1) - 1, 0, rows.shape[1] - 1)
        chosen = jnp.take_along_axis(rows, number[..., None], 1).astype(embeddings.dtype)
        merged = jnp.where(is_image[..., None], chosen, embeddings)
        return constrain(merged, "batch", "seq", "embed")

    def _features(
        self, environment: TraceEnvironment, images: jax.Array, tower_arguments: Mapping[str, Any]
    ) -> jax.Array:
        """Return the features of all images, (images, tokens, embed)."""
        pixels, count = self._tower_input(images), images.shape[0] * images.shape[1]
        arguments = {
            name: environment.constant(one) if name in _OF_ARRAYS else one
            for name, one in tower_arguments.items()
        }
        # Its sequences are images: no documents, and of lengths that no mesh axis divides.
        with isolate_documents(None), unsplit("residual"):
            found = self.module.get_image_features(
                Tensor(pixels, environment), return_dict=True, **arguments
            ).pooler_output
        parts = found if isinstance(found, list | tuple) else [found]
        array = jnp.concatenate([part.jax().reshape(-1, part.shape[-1]) for part in parts])
        if len(array) != count * self.layout.tokens:
            raise ImportedModelError(
                f"program.model.images: {type(self.module).__name__} computes "
                f"{len(array) / count:g} features of an image of {self.layout.height} x "
                f"{self.layout.width} pixels, and {self.layout.tokens} were expected, as of Llava "
                "or Qwen2.5-VL; this model is not supported with images"
            )
        return array.reshape(count, self.layout.tokens, -1)

    def _tower_input(self, images: jax.Array) -> jax.Array:
        """Return normalized images, or their patches."""
        pixels = normalized_pixels(images, self.normalization)
        if not self.has_grid:
            return pixels
        vision = self.module.config.vision_config
        return cut_into_patches(
            pixels, vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        )

    def _grids(self, count: int) -> torch.Tensor:
        """Return the grid of each image in patches: time, rows and columns."""
        merge = self.module.config.vision_config.spatial_merge_size
        rows, columns = self.layout.grid
        return torch.tensor([[1, rows * merge, columns * merge]] * count)

    def tower_arguments(self, rows: int) -> dict[str, Any]:
        """Return what the tower computes from the grids of the images of so many rows.

        A trace does not know their values. Call it outside of torchax's environment.
        """
        if not self.has_grid:
            return {}
        from transformers import vision_utils

        grids, vision = self._grids(rows * self.layout.images), self.module.config.vision_config
        ends = vision_utils.get_vision_cu_seqlens(grids)
        arguments: dict[str, Any] = {
            "image_grid_thw": grids,
            "position_ids": vision_utils.get_vision_position_ids(grids, vision.spatial_merge_size),
            "cu_seqlens": ends,
            "max_seqlen": _longest(ends),
        }
        if hasattr(vision, "window_size"):
            index, window_ends = vision_utils.get_vision_window_index(
                grids, vision.spatial_merge_size, vision.window_size, vision.patch_size
            )
            arguments |= {
                "window_index": index,
                "cu_window_seqlens": window_ends,
                "max_window_seqlen": _longest(window_ends),
            }
        return arguments

    def eager_arguments(self, tokens: torch.Tensor, images: np.ndarray) -> dict[str, Any]:
        """Return the arguments with which transformers' own module takes the same images.

        Args:
            tokens: (batch, seq).
            images: (batch, images, height, width, 3), uint8; a row's images that have no
                placeholders are left out.
        """
        is_image = tokens == self.layout.token
        counts = (is_image.sum(1) // self.layout.tokens).tolist()
        used = np.concatenate([row[:count] for row, count in zip(images, counts, strict=True)])
        arguments: dict[str, Any] = {"input_ids": tokens}
        if not len(used):
            return arguments
        arguments["pixel_values"] = torch.tensor(
            np.asarray(self._tower_input(jnp.asarray(used[:, None])))
        )
        if self.has_grid:
            arguments["image_grid_thw"] = self._grids(len(used))
        if self.has_positions:
            arguments["mm_token_type_ids"] = is_image.int()
        return arguments


# Arguments of towers that modules compute with; the others only say where segments end.
_OF_ARRAYS = ("position_ids", "window_index")


def _longest(ends: torch.Tensor) -> int:
    return int(ends.diff().max())
