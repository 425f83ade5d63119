"""For how many positions logits exist at once; imports no JAX, so that estimates know too.

`graphtrain.models.chunked_loss` computes the loss so. What a chunk costs is to read and write the
head's gradient, which each adds to; what chunks cost is that gradient itself, whole over embed,
beside the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.config.schema import Program, is_imported
from graphtrain.models.flops import step_flops_per_token
from lowering.machine.target import Target
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

# A chunk reads and writes a float32 for each weight of the head. That may take a fiftieth of a
# step, on a machine of 300 operations for each byte of its memory's traffic; with 4,096 tokens of a
# device it takes a tenth of the time of the head's products, whatever its share of the step.
_BYTES_OF_WEIGHT = 8
_OPERATIONS_OF_BYTE = 300
_LOST = 1 / 50
_TOKENS = 4096
_FEWEST_TOKENS = 1024  # fewer rows would leave products short
# Of a device's memory. Less than the first is not worth a loop; more than the second, which with a
# wide vocabulary also _TOKENS take, is worth shorter chunks.
_WORTH_SAVING = 1 / 256
_TOO_MUCH = 1 / 16
_ROWS = 8  # of a tile: positions of a chunk are a multiple


@dataclass(frozen=True)
class Logits:
    """Those of a microbatch on one device."""

    sequences: int
    positions: int  # of each sequence
    vocab: int
    embed: int
    item: int  # bytes of a number of their gradient
    step_flops: float  # of a token, all layers included

    @property
    def tokens(self) -> int:
        return self.sequences * self.positions

    def bytes_of(self, tokens: int) -> int:
        """With their gradient."""
        return (4 + self.item) * tokens * self.vocab


def chunk_of(program: Program, rules: Rules, mesh: MeshShape) -> int | None:
    """Positions of a sequence whose logits a program has at once; None: of all that a device has.

    By itself only a GPU's or a TPU's program has chunks: a CPU's is slower with them and its memory
    is rarely short, and those of other machines are untried. A vocabulary that is split needs
    collectives for each chunk, and its logits are split already.

    Raises:
        ShardingError: as check_chunk.
    """
    how = program.loss.chunk
    if how == "whole":
        return None
    positions = program.batch.length // mesh.size(rules.activations.get("seq", ()))
    if how != "auto":
        check_chunk(how, positions)
        return how
    target = Target.parse(program.target)
    model, batch = program.model, program.batch
    if (
        not (target.is_gpu or target.platform == "tpu")
        or is_imported(model)
        or program.loss.kind != "cross_entropy"
        or mesh.axes.get("stage", 1) > 1
        or mesh.size(rules.activations.get("vocab", ())) > 1
    ):
        return None
    logits = Logits(
        sequences=batch.sequences
        // batch.microbatches
        // mesh.size(rules.activations.get("batch", ())),
        positions=positions,
        vocab=model.vocab,
        embed=model.embed,
        item=2 if model.dtype == "bfloat16" else 4,
        step_flops=step_flops_per_token(program),
    )
    return best_chunk(logits, target.memory_bytes)


def check_chunk(chunk: int, positions: int) -> None:
    """Refuse a chunk that does not divide what a device has of a sequence.

    Raises:
        ShardingError: says what to change.
    """
    if positions % chunk:
        raise ShardingError(
            f"loss.chunk = {chunk} does not divide the {positions} positions that a device has "
            "of a sequence; change it, batch.length, or the rules that split seq"
        )


def best_chunk(logits: Logits, memory_bytes: int) -> int | None:
    """The shortest chunk that costs little time; None where chunks would save too little memory."""
    tokens = _fewest_tokens(logits, memory_bytes)
    chunk = next(
        (
            positions
            for positions in range(_ROWS, logits.positions, _ROWS)
            if logits.positions % positions == 0 and logits.sequences * positions >= tokens
        ),
        logits.positions,
    )
    of_head = 4 * logits.embed * logits.vocab
    whole, in_chunks = logits.bytes_of(logits.tokens), logits.bytes_of(logits.sequences * chunk)
    return chunk if whole - in_chunks - of_head >= _WORTH_SAVING * memory_bytes else None


def _fewest_tokens(logits: Logits, memory_bytes: int) -> int:
    """Of a device, that a chunk is to have."""
    moved = _BYTES_OF_WEIGHT * logits.embed * logits.vocab
    enough = _OPERATIONS_OF_BYTE * moved / (_LOST * logits.step_flops)
    tokens = _FEWEST_TOKENS
    while tokens < min(enough, _TOKENS) and logits.bytes_of(2 * tokens) <= _TOO_MUCH * memory_bytes:
        tokens *= 2
    return tokens
