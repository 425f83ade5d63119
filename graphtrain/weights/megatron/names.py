"""Canonical names for the arrays in checkpoints of all versions of Megatron-LM.

Canonical names are those of megatron-core's local layers, with separate norms and numbered experts:
`decoder.layers.3.mlp.experts.0.linear_fc1.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Applied in this order. Transformer Engine names a norm after the linear layer that follows it;
# versions before megatron-core have other names.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(module\.|model\.)+", ""),
        (r"^language_model\.(embedding|output_layer)\.", r"\1."),
        (r"^(language_model\.)?(encoder|transformer)\.", "decoder."),
        (r"(\.\d+)\.attention\.", r"\1.self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_h_to_4h_2\.", ".linear_fc1_up."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.(input|final)_norm\.", r".\1_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
        (r"\.experts\.local_experts\.", ".experts."),
        (r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".experts.\3.\1.\2"),
    )
)
# State other than weights: of kernels, of RoPE; also copies of the embedding for a tied head.
_NOT_WEIGHTS = re.compile(
    r"(.*(_extra_state.*|inv_freq|word_embeddings_for_head\.weight)"
    r"|(module\.|model\.)*word_embeddings\.weight)$"
)
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
_LAYER = re.compile(r"(?<=^decoder\.layers\.)(\d+)(?=\.)")


def canonical_name(name: str) -> str | None:
    """Return the canonical name of an array, or None for state that is not a weight."""
    if _NOT_WEIGHTS.match(name):
        return None
    for pattern, renamed in _RENAMED:
        name = pattern.sub(renamed, name)
    return name


def layer_of(name: str) -> int | None:
    """Return the layer of an array by its name, or None."""
    match = _LAYER.search(name)
    return int(match[0]) if match else None


def expert_of(name: str) -> int | None:
    """Return the expert of an array by its name, or None."""
    match = _EXPERT.search(name)
    return int(match[0]) if match else None


def offset_name(name: str, layers: int, experts: int) -> str:
    """Return the name with its layer and expert numbers increased by these offsets."""
    name = _LAYER.sub(lambda match: str(int(match[0]) + layers), name)
    return _EXPERT.sub(lambda match: str(int(match[0]) + experts), name)


def flatten_names(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries, with names joined by dots."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
