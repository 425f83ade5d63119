"""Choice of the loss chunk: the number of positions whose logits exist at once; imports no JAX.

`models.chunked_loss` computes the loss in chunks. In time, each chunk costs a read and a write of
the head's gradient, to which it adds. In memory, chunks cost that gradient, unsharded over embed,
in addition to the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema.types import item_bytes
from graphtrain.models.flops import step_flops_per_token
from sharding_rules.errors import ShardingError

# A chunk reads and writes a float32 for each weight of the head. Chunks are long enough for this to
# be at most 1/50 of the step's time, on a machine with 300 operations per byte of memory traffic;
# or they have 4,096 tokens per device, for which it is 1/10 of the time of the head's products.
_BYTES_OF_WEIGHT = 8
_OPERATIONS_OF_BYTE = 300
_MAX_OVERHEAD = 1 / 50
_TOKENS = 4096
_FEWEST_TOKENS = 1024  # fewer rows make the products inefficient
# Fractions of a device's memory. Savings below the first are not worth a loop. Chunks are shorter
# if their logits would exceed the second, as those of _TOKENS do with a large vocabulary.
_MIN_SAVING = 1 / 256
_MAX_LOGITS_SHARE = 1 / 16
_ROWS = 8  # rows of a tile, of which the positions of a chunk are a multiple


@dataclass(frozen=True)
class Logits:
    """Logits of one microbatch on one device."""

    sequences: int
    positions: int  # of each sequence
    vocab: int
    embed: int
    item: int  # bytes per element of their gradient
    step_flops: float  # floating-point operations per token of a training step

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.sequences * self.positions

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of the float32 logits of `tokens` tokens, and of their gradient."""
        return (4 + self.item) * tokens * self.vocab


def loss_chunk(program: ResolvedProgram) -> int | None:
    """Return the positions per chunk of a program's loss; None: all that a device has.

    With loss.chunk = "auto" only programs for GPUs and TPUs have chunks: a CPU's is slower with
    them and its memory is rarely short, and other machines are untested. A sharded vocabulary would
    need collectives for each chunk, and its logits are sharded already.

    Args:
        program: settings; the model is native, as others have no separate LM head.

    Raises:
        ShardingError: as check_chunk.
    """
    setting, rules, mesh = program.loss.chunk, program.rules, program.mesh
    if setting == "none":
        return None
    positions = program.batch.seq_len // mesh.size(rules.activations.get("seq", ()))
    if setting != "auto":
        check_chunk(setting, positions)
        return setting
    model, batch, target = program.model, program.batch, program.target
    if (
        not (target.is_gpu or target.platform == "tpu")
        or program.loss.kind != "cross_entropy"
        or program.loss.custom is not None
        or mesh.axes.get("stage", 1) > 1
        or mesh.size(rules.activations.get("vocab", ())) > 1
    ):
        return None
    logits = Logits(
        sequences=batch.microbatch_rows // mesh.size(rules.activations.get("batch", ())),
        positions=positions,
        vocab=model.vocab,
        embed=model.embed,
        item=item_bytes(model.dtype),
        step_flops=step_flops_per_token(program.settings),
    )
    return best_chunk(logits, target.memory_bytes)


def check_chunk(chunk: int, positions: int) -> None:
    """Raise if a chunk does not divide the positions of a sequence on one device.

    Raises:
        ShardingError: the message says what to change.
    """
    if positions % chunk:
        raise ShardingError(
            f"loss.chunk = {chunk} does not divide the {positions} positions of a sequence on one "
            "device; change loss.chunk, batch.seq_len, or the rules that shard seq"
        )


def best_chunk(logits: Logits, memory_bytes: int) -> int | None:
    """Return the shortest chunk that costs little time.

    Return None if chunks would save too little memory.
    """
    tokens = _fewest_tokens(logits, memory_bytes)
    chunk = next(
        (
            positions
            for positions in range(_ROWS, logits.positions, _ROWS)
            if logits.positions % positions == 0 and logits.sequences * positions >= tokens
        ),
        logits.positions,
    )
    head_gradient_bytes = 4 * logits.embed * logits.vocab
    unchunked_bytes, chunked_bytes = (
        logits.bytes_of(logits.tokens),
        logits.bytes_of(logits.sequences * chunk),
    )
    return (
        chunk
        if unchunked_bytes - chunked_bytes - head_gradient_bytes >= _MIN_SAVING * memory_bytes
        else None
    )


def _fewest_tokens(logits: Logits, memory_bytes: int) -> int:
    """Return the minimum number of tokens per device in one chunk."""
    weight_bytes = _BYTES_OF_WEIGHT * logits.embed * logits.vocab
    sufficient_tokens = _OPERATIONS_OF_BYTE * weight_bytes / (_MAX_OVERHEAD * logits.step_flops)
    tokens = _FEWEST_TOKENS
    while (
        tokens < min(sufficient_tokens, _TOKENS)
        and logits.bytes_of(2 * tokens) <= _MAX_LOGITS_SHARE * memory_bytes
    ):
        tokens *= 2
    return tokens
