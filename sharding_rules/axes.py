"""The vocabulary: every array axis and mesh axis, with its meaning."""

import difflib
from collections.abc import Iterable

from sharding_rules.errors import ShardingError

# Slowest link first: neighbours on the last axis exchange the most data and sit closest together.
MESH_AXES = {
    "data": "copies of the model that see different sequences",
    "fsdp": "sequences and weights both split; weights are gathered for use (ZeRO-3)",
    "stage": "consecutive layers, as a pipeline",
    "expert": "experts of a mixture",
    "context": "positions of long sequences",
    "tensor": "heads, MLP and vocabulary, with the residual stream split by position",
}

ARRAY_AXES = {
    "attended": "positions of keys and values; split, attention passes them around a ring",
    "attending": "positions of queries inside attention",
    "attention_heads": "query heads inside attention, those that a split of heads leaves together",
    "attention_kv_heads": "key and value heads inside attention, likewise",
    "batch": "sequences of a step",
    "capacity": "tokens that one expert takes",
    "embed": "the residual stream",
    "experts": "experts of a mixture",
    "head_dim": "inside one attention head",
    "grouped": "sequences of a step, while their tokens are with experts",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "layers": "the scanned stack of layers",
    "microbatch": "parts of a batch whose gradients are accumulated one after the other",
    "mlp": "the hidden width of the MLP",
    "positions": "rows of a learned position table",
    "rank": "the inner width of an adapter",
    "residual": "positions of the residual stream, between attention and MLP",
    "rounds": "times a microbatch passes the stages of a pipeline",
    "routes": "experts, as a router scores them",
    "seq": "positions, where a block works on all that tensor parallelism leaves whole",
    "shared": "the hidden width of the expert that every token has",
    "stages": "stages of a pipeline, side by side",
    "vocab": "tokens of the vocabulary",
}


def check_axes(names: Iterable[str | None], known: dict[str, str], where: str) -> None:
    """Refuse a name outside the vocabulary: a misspelt axis would replicate its array in silence.

    Raises:
        ShardingError: with the nearest known name.
    """
    for name in names:
        if name is None or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known axes: {', '.join(known)}"
        raise ShardingError(f"{where}: unknown axis {name!r}; {hint}")
