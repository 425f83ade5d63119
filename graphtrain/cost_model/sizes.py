"""Sizes of the arrays that one device computes."""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.config.computed_once import computed_once
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema.types import item_bytes
from graphtrain.models.chunk_size import head_blocks, loss_chunk, parts_of_chunk
from lowering.machine.target import TPU_LANES, Target


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes of what one device computes in one microbatch."""

    sequences: float
    seq_residual: float  # positions of the residual stream, between attention and MLP
    seq_in_block: float  # positions inside attention and MLP
    kv_positions: float  # positions of keys and values that exist at once
    heads: float
    kv_heads: float
    head_dim: int  # with padding
    mlp: float
    shared: float  # hidden width of the expert of every token
    dense_mlp: float  # of dense layers before those of a mixture
    vocab: float
    logit_positions: float  # positions whose logits' gradient exists at once
    scored_positions: float  # positions whose float32 logits exist at once
    in_chunks: bool  # whether the loss is computed in chunks
    head_blocks: int  # blocks of the vocabulary in which the head's gradient is reduced
    layers: float  # those of its stage, and its share of a microbatch's dense ones before them
    item_bytes: int  # bytes per element of activations

    @staticmethod
    @computed_once
    def of(program: ResolvedProgram) -> DeviceSizes:
        """Return the sizes for a program."""
        model, batch = program.model, program.batch
        rules, mesh = program.rules, program.mesh
        assert model.kv_heads and model.head_dim

        def split(size: float, axis: str) -> float:
            return size / mesh.size(rules.activations.get(axis, ()))

        inside, chunk = split(batch.seq_len, "seq"), loss_chunk(program)
        sequences = split(batch.microbatch_rows, "batch")
        vocab_shards = mesh.size(rules.activations.get("vocab", ()))
        dense_mlp = (model.moe and model.moe.dense_mlp) or 0
        shared = (model.moe and model.moe.shared_expert_mlp) or 0
        # Stages divide the dense layers by microbatches.
        layers = model.depth / mesh.size(rules.parameters.get("layers", ()))
        return DeviceSizes(
            sequences=sequences,
            seq_residual=split(batch.seq_len, "residual"),
            seq_in_block=inside,
            kv_positions=split(batch.seq_len, "kv_seq"),
            heads=split(split(model.heads, "heads"), "attention_heads"),
            kv_heads=max(1, split(split(model.kv_heads, "kv_heads"), "attention_kv_heads")),
            head_dim=_padded_head_dim(model.head_dim, program.target),
            mlp=split(model.mlp, "mlp"),
            shared=split(shared, "shared"),
            dense_mlp=split(dense_mlp, "dense_mlp"),
            vocab=split(model.vocab, "vocab"),
            logit_positions=chunk or inside,
            scored_positions=(
                chunk / parts_of_chunk(sequences, chunk, vocab_shards) if chunk else inside
            ),
            in_chunks=chunk is not None,
            head_blocks=1 if chunk is None else head_blocks(program, chunk),
            layers=layers,
            item_bytes=item_bytes(model.dtype),
        )


def _padded_head_dim(head_dim: int, target: Target) -> int:
    """Return head_dim with padding: TPUs pad the last dimension of an array to rows of 128."""
    if target.platform != "tpu":
        return head_dim
    return -(-head_dim // TPU_LANES) * TPU_LANES
