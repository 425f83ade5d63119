"""Names of all array axes and mesh axes, with their meaning."""

import difflib
from collections.abc import Iterable

from sharding_rules.errors import ShardingError

# Slowest links first: devices along the last axis exchange the most data and are closest together.
MESH_AXES = {
    "data": "data parallelism: replicas of the model, each with other sequences",
    "fsdp": "fully sharded data parallelism (ZeRO-3): sequences and weights are split, and weights "
    "are gathered for use",
    "stage": "pipeline parallelism: consecutive layers on consecutive stages",
    "expert": "expert parallelism: experts of a mixture",
    "context": "context parallelism: positions of long sequences",
    "tensor": "tensor parallelism: heads, MLP and vocabulary, with sequence parallelism of the "
    "residual stream",
}

ARRAY_AXES = {
    "ahead": "features of the residual stream as outputs of a projection of multi-token prediction",
    "attention_heads": "query heads inside attention, after a split of heads",
    "attention_kv_heads": "key and value heads inside attention, after a split of heads",
    "batch": "sequences of a step",
    "capacity": "tokens of one expert, up to its capacity",
    "dense_layers": "the scanned stack of dense layers before those of a mixture",
    "dense_mlp": "hidden features of the MLP of dense layers before those of a mixture",
    "dispatch_batch": "sequences of a step, while their tokens are dispatched to experts",
    "embed": "features of the residual stream",
    "experts": "experts of a mixture",
    "head_dim": "features of one attention head",
    "heads": "query heads",
    "kv_latent": "latent of keys and values in latent attention, as output of its product",
    "kv_lora": "latent of keys and values in latent attention, as input of their products",
    "kv_heads": "key and value heads",
    "kv_seq": "positions of keys and values; if split, ring attention passes them on",
    "layers": "the scanned stack of layers",
    "microbatch": "microbatches of gradient accumulation",
    "mlp": "hidden features of the MLP",
    "nope_head_dim": "features of a head that latent attention does not rotate",
    "positions": "rows of a learned position embedding",
    "q_latent": "latent of queries in latent attention, as output of its product",
    "q_lora": "latent of queries in latent attention, as input of their product",
    "q_seq": "positions of queries inside attention",
    "rank": "rank of a LoRA adapter",
    "residual": "positions of the residual stream, outside attention and MLP",
    "rope_head_dim": "features of a head that latent attention rotates",
    "router": "experts, as outputs of the router",
    "seq": "positions inside attention and MLP, which sequence parallelism does not split",
    "shared": "hidden features of the shared expert",
    "stages": "stages of a pipeline, side by side",
    "unstaged_layers": "a scanned stack of an imported model's layers outside of pipeline stages",
    "v_head_dim": "features of a value head in latent attention",
    "virtual_stages": "virtual stages of a pipeline, on the same device",
    "vocab": "token ids of the vocabulary",
}


def check_axes(names: Iterable[str | None], known: dict[str, str], where: str) -> None:
    """Check axis names: a misspelled axis would silently replicate its array.

    Args:
        names: names to check; None is allowed.
        known: all valid names, with their meaning.
        where: location for the error message.

    Raises:
        ShardingError: a name is unknown; the message suggests the most similar one.
    """
    for name in names:
        if name is not None and (problem := unknown_axis(name, known)):
            raise ShardingError(f"{where}: {problem}")


def unknown_axis(name: str, known: dict[str, str]) -> str:
    """Return that an axis is unknown, with the most similar one; empty if it is known."""
    if name in known:
        return ""
    similar = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"known axes: {', '.join(known)}"
    return f"unknown axis {name!r}; {hint}"
