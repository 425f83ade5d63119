"""Names of a vision tower's weights in transformers, by those of its native equivalent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphtrain.config.tower import Tower
from sharding_rules.rules import matches

_LLAVA = {
    "embedding/tokens": "model/vision_tower/embeddings/patch_embedding",
    "embedding/positions": "model/vision_tower/embeddings/position_embedding",
    "layers/attention/query": "model/vision_tower/encoder/layers/N/self_attn/q_proj",
    "layers/attention/key": "model/vision_tower/encoder/layers/N/self_attn/k_proj",
    "layers/attention/value": "model/vision_tower/encoder/layers/N/self_attn/v_proj",
    "layers/attention/output": "model/vision_tower/encoder/layers/N/self_attn/out_proj",
    "layers/mlp/up": "model/vision_tower/encoder/layers/N/mlp/fc1",
    "layers/mlp/down": "model/vision_tower/encoder/layers/N/mlp/fc2",
}
_QWEN = {
    "embedding/tokens": "model/visual/patch_embed/proj",
    "layers/attention/query": "model/visual/blocks/N/attn/qkv",
    "layers/attention/key": "model/visual/blocks/N/attn/qkv",
    "layers/attention/value": "model/visual/blocks/N/attn/qkv",
    "layers/attention/output": "model/visual/blocks/N/attn/proj",
    "layers/mlp/gate": "model/visual/blocks/N/mlp/gate_proj",
    "layers/mlp/up": "model/visual/blocks/N/mlp/up_proj",
    "layers/mlp/down": "model/visual/blocks/N/mlp/down_proj",
}
_WEIGHTS = {"llava": _LLAVA, "qwen2_5_vl": _QWEN}
_PROJECTIONS = {
    "llava": ("model/multi_modal_projector/linear_1", "model/multi_modal_projector/linear_2"),
    "qwen2_5_vl": ("model/visual/merger/mlp/0", "model/visual/merger/mlp/2"),
}


def with_trained_weights(tower: Tower, kind: str, patterns: Sequence[str]) -> Tower:
    """Return a tower with the matrices that an adapter trains in full.

    An array of which it trains some blocks counts as a whole.

    Args:
        tower: the tower.
        kind: model_type of the model.
        patterns: adapter.modules_to_save, which name a parameter or its module.
    """

    def is_trained(module: str) -> bool:
        names = (name for path in _paths(module, tower) for name in (path, f"{path}/weight"))
        return any(matches(name, pattern) for name in names for pattern in patterns)

    return replace(
        tower,
        trained=tuple(path for path, module in _WEIGHTS[kind].items() if is_trained(module)),
        trained_projection=tuple(
            index for index, module in enumerate(_PROJECTIONS[kind]) if is_trained(module)
        ),
    )


def _paths(module: str, tower: Tower) -> Iterator[str]:
    """Yield the paths of a module, whose blocks are stacked by a period that is not known."""
    layers = tower.model.layers
    for number in (*map(str, range(layers)), f"0-{layers - 1}"):
        yield module.replace("/N/", f"/{number}/")
