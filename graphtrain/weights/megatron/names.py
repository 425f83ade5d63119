"""The names that arrays have in Megatron's checkpoints of all ages, brought to one set.

The set is that of megatron-core's own layers: norms by themselves, experts by their number:
`decoder.layers.3.mlp.experts.0.linear_fc1.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# In this order. Transformer Engine keeps a norm with the product that follows it; what came before
# megatron-core has names of its own.
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
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.(input|final)_norm\.", r".\1_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
        (r"\.experts\.local_experts\.", ".experts."),
        (r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".experts.\3.\1.\2"),
    )
)
# State that is no weight: of kernels, of angles; the embedding once more, where a tied head is.
_NOT_WEIGHTS = re.compile(r".*(_extra_state.*|inv_freq|word_embeddings_for_head\.weight)$")
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
_LAYER = re.compile(r"(?<=^decoder\.layers\.)(\d+)(?=\.)")


def canonical(name: str) -> str | None:
    """The one name of an array; none for state that is no weight."""
    if _NOT_WEIGHTS.match(name):
        return None
    for pattern, renamed in _RENAMED:
        name = pattern.sub(renamed, name)
    return name


def layer_of(name: str) -> int | None:
    """The layer an array is in."""
    found = _LAYER.search(name)
    return int(found[0]) if found else None


def expert_of(name: str) -> int | None:
    """The expert an array is of."""
    found = _EXPERT.search(name)
    return int(found[0]) if found else None


def moved(name: str, layers: int, experts: int) -> str:
    """The name of an array so many layers and experts further on."""
    name = _LAYER.sub(lambda found: str(int(found[0]) + layers), name)
    return _EXPERT.sub(lambda found: str(int(found[0]) + experts), name)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries by names with dots."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
