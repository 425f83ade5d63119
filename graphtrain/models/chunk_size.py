"""Choice of the loss chunk: the number of positions whose logits exist at once; imports no JAX.

`models.chunked_loss` computes the loss in chunks. In time, each chunk costs a read and a write of
the head's gradient, to which it adds. In memory, chunks cost that gradient, unsharded over embed,
in addition to the logits. Of these, the float32 ones are computed in parts of a chunk, the gradient
in the model's dtype waits until the chunk is complete. Where devices shard the vocabulary, each has
its part of the logits and of the head's gradient, and each part of a chunk waits for reductions.

Where the head's gradient is larger than that of all logits, all positions are one chunk, and the
head's gradient is computed, reduced and scattered in blocks of the vocabulary: it never exists
unsharded. This costs no time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphtrain.config.loss_positions import (
    check_loss_chunk,
    has_two_losses_in_stages,
    loss_positions,
)
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema.types import item_bytes
from graphtrain.models.flops import step_flops_per_token
from graphtrain.models.head_gradient_support import defers_gradients
from graphtrain.models.shapes import head_path
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import divisors, has_general_layout, make_layout

# A chunk reads and writes a float32 for each weight of the head. Chunks are long enough for this to
# be at most a twentieth of the time of the step's products, where these reach 165 operations per
# byte of memory traffic (an H100 at 0.56 of its peak; A100 106, v5e 216:
# lowering/machine/topologies.toml). With 4,096 tokens per device it is that of the head's products.
# With a sharded vocabulary, maxima and sums are reduced too, of so few bytes that each reduction
# takes its latency (5 us, as in cost_model.time), in which that H100 computes 2.8e9 operations.
_BYTES_OF_WEIGHT = 8
_OPERATIONS_OF_BYTE = 165
_OPERATIONS_OF_REDUCTION = 2.8e9
_REDUCTIONS = 2
_MAX_OVERHEAD = 1 / 20
_TOKENS = 4096
_FEWEST_TOKENS = 1024  # fewer rows make the products with all weights of the head inefficient
# Fractions of a device's memory. Savings below the first are not worth a loop. Chunks are shorter
# if their logits would exceed the second, as those of _TOKENS do with a large vocabulary.
_MIN_SAVING = 1 / 384
_MAX_LOGITS_SHARE = 1 / 16
_ROWS = 8  # rows of a tile, of which the positions of a chunk are a multiple
# A chunk's logits are computed in parts, which cost next to nothing: they only read the head's
# weights in the model's dtype once more. A product of 256 rows has 256 operations for each byte of
# these weights, more than the 165 for which reading them takes as long. With a sharded vocabulary a
# part needs its reductions; its tokens are then as many as make them a twentieth of the head's time
# in a model of width 1,024, of whose vocabulary of 32,000 a device has a quarter.
_PARTS = (8, 4, 2)
_FEWEST_TOKENS_OF_PART = 256
_FEWEST_TOKENS_WITH_REDUCTIONS = 2048
_MOST_BLOCKS = 8  # of the vocabulary, for the head's gradient
_COLUMNS_MULTIPLE = 16  # columns of a tile
# A chunk of all positions, with the head's gradient in blocks, is chosen up to this many times the
# bytes of shorter chunks, because it is faster: it does not read and write the head's gradient.
_BYTES_OVER_CHUNKS = 1.03


@dataclass(frozen=True)
class Logits:
    """Logits of one microbatch on one device."""

    sequences: int
    positions: int  # of each sequence
    vocab: int  # of the device, if it is sharded
    embed: int
    item: int  # bytes per element of their gradient
    step_flops: float  # a device's floating-point operations per token of a training step
    vocab_shards: int = 1
    head_shards: int = 1  # devices over which a gradient of the head in blocks is scattered

    @property
    def head_gradient_bytes(self) -> int:
        """Bytes of the head's gradient: float32, unsharded over embed."""
        return 4 * self.embed * self.vocab

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.sequences * self.positions

    def bytes_of(self, tokens: int, parts: int = 1) -> float:
        """Return the bytes of `tokens` logits' gradient, and of the float32 logits of a part."""
        return (4 / parts + self.item) * tokens * self.vocab


def loss_chunk(program: ResolvedProgram) -> int | None:
    """Return the positions per chunk of a program's loss; None: all that a device has.

    With loss.chunk = "auto" only programs for GPUs and TPUs have chunks: a CPU's is slower with
    them and its memory is rarely short, and other machines are untested.

    Args:
        program: settings; the model is native, as others have no separate LM head.

    Raises:
        ShardingError: as check_loss_chunk.
    """
    setting, rules, mesh = program.loss.chunk, program.rules, program.mesh
    if setting == "none":
        return None
    check_loss_chunk(program.settings, mesh, rules)
    if setting != "auto":
        return setting
    model, batch, target = program.model, program.batch, program.target
    if (
        not (target.is_gpu or target.platform == "tpu")
        or program.loss.kind != "cross_entropy"
        or program.loss.custom is not None
        or has_two_losses_in_stages(program.settings, mesh)
    ):
        return None
    vocab_shards = mesh.size(rules.activations.get("vocab", ()))
    logits = Logits(
        sequences=batch.microbatch_rows // mesh.size(rules.activations.get("batch", ())),
        positions=loss_positions(program.settings, mesh, rules)[0],
        vocab=model.vocab // vocab_shards,
        embed=model.embed,
        item=item_bytes(model.dtype),
        step_flops=step_flops_per_token(program.settings) / vocab_shards,
        vocab_shards=vocab_shards,
        head_shards=_head_shards(program),
    )
    return best_chunk(logits, target.memory_bytes)


def head_blocks(program: ResolvedProgram, chunk: int) -> int:
    """Return in how many blocks of the vocabulary the gradient of the LM head is reduced.

    There are blocks only where all positions of a device are one chunk; see best_chunk.

    Args:
        program: Settings.
        chunk: Positions of a chunk.
    """
    positions = program.batch.seq_len // program.mesh.size(program.rules.activations.get("seq", ()))
    if chunk < positions or _head_shards(program) == 1:
        return 1
    return _blocks_of(program.model.vocab)


def _head_shards(program: ResolvedProgram) -> int:
    """Return over how many devices the head's gradient is scattered, if that can be in blocks.

    Blocks are for GPUs; on TPUs they were not tried. Adapters freeze the head. In pipelines, and
    where gradients are reduced once for each step, the gradient is reduced later.
    """
    model, mesh, rules = program.model, program.mesh, program.rules
    if (
        not program.target.is_gpu
        or program.adapter is not None
        or mesh.axes.get("stage", 1) > 1
        or defers_gradients(program)
    ):
        return 1
    head = ArraySpec((model.embed, model.vocab), ("embed", "vocab"), role="optimizer")
    names, of_vocab = make_layout("head", head, rules, mesh).split
    if mesh.size((*of_vocab, *rules.activations.get("vocab", ()))) > 1 or _is_moved(program, head):
        return 1
    of_tokens = {name for axis in ("batch", "seq") for name in rules.activations.get(axis, ())}
    return mesh.size(tuple(name for name in names if name in of_tokens))


def _is_moved(program: ResolvedProgram, head: ArraySpec) -> bool:
    """Return whether rules of single arrays shard the head otherwise than others of its axes."""
    rules, mesh = program.rules, program.mesh
    path = head_path(program.model)
    specs = head, replace(head, role="parameter")
    return not all(has_general_layout(path, spec, rules, mesh) for spec in specs)


def _blocks_of(vocab: int) -> int:
    count = _MOST_BLOCKS
    while vocab % (count * _COLUMNS_MULTIPLE) and count > 1:
        count //= 2
    return count


def parts_of_chunk(sequences: float, positions: int, vocab_shards: int = 1) -> int:
    """Return the number of parts of a chunk, of which one has float32 logits at once.

    Args:
        sequences: Sequences of a device in a chunk.
        positions: Positions of each in a chunk.
        vocab_shards: Number of shards of the vocabulary.
    """
    fewest = _FEWEST_TOKENS_OF_PART if vocab_shards == 1 else _FEWEST_TOKENS_WITH_REDUCTIONS
    return next(
        (
            parts
            for parts in _PARTS
            if positions % (parts * _ROWS) == 0 and sequences * positions // parts >= fewest
        ),
        1,
    )


def best_chunk(logits: Logits, memory_bytes: int) -> int | None:
    """Return the shortest chunk that costs little time, or all positions if that needs no more.

    Return None if chunks would save too little memory.
    """
    tokens = _fewest_tokens(logits, memory_bytes)
    chunk = next(
        (
            positions
            for positions in divisors(logits.positions)
            if positions % _ROWS == 0 and logits.sequences * positions >= tokens
        ),
        logits.positions,
    )
    # All logits, then the product of the head's gradient with the gradient of all.
    unchunked_bytes = logits.item * logits.tokens * logits.vocab + max(
        4 * logits.tokens * logits.vocab, logits.head_gradient_bytes
    )
    parts = parts_of_chunk(logits.sequences, chunk, logits.vocab_shards)
    least_bytes = logits.head_gradient_bytes + logits.bytes_of(logits.sequences * chunk, parts)
    in_blocks_bytes = _bytes_in_blocks(logits)
    if in_blocks_bytes is not None and in_blocks_bytes <= _BYTES_OVER_CHUNKS * least_bytes:
        chunk, least_bytes = logits.positions, in_blocks_bytes
    return chunk if unchunked_bytes - least_bytes >= _MIN_SAVING * memory_bytes else None


def _bytes_in_blocks(logits: Logits) -> float | None:
    """Return the bytes of one chunk of all positions with the head's gradient in blocks.

    Two blocks exist unsharded: one is computed while the other is reduced. None: no blocks.
    """
    blocks = _blocks_of(logits.vocab)
    if logits.head_shards == 1 or blocks == 1:
        return None
    parts = parts_of_chunk(logits.sequences, logits.positions)
    of_part = 4 * logits.tokens * logits.vocab / parts
    of_blocks = 2 * logits.head_gradient_bytes / blocks
    scattered = logits.head_gradient_bytes / logits.head_shards
    return logits.item * logits.tokens * logits.vocab + max(of_part, of_blocks) + scattered


def _fewest_tokens(logits: Logits, memory_bytes: int) -> int:
    """Return the minimum number of tokens per device in one chunk."""
    operations = _OPERATIONS_OF_BYTE * _BYTES_OF_WEIGHT * logits.embed * logits.vocab
    if logits.vocab_shards > 1:
        operations += _REDUCTIONS * _OPERATIONS_OF_REDUCTION
    sufficient_tokens = operations / (_MAX_OVERHEAD * logits.step_flops)
    tokens = _FEWEST_TOKENS
    while (
        tokens < min(sufficient_tokens, _TOKENS)
        and logits.bytes_of(2 * tokens) <= _MAX_LOGITS_SHARE * memory_bytes
    ):
        tokens *= 2
    return tokens
