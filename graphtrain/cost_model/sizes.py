"""Sizes of what one device computes."""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.config.schema import Program
from graphtrain.models.chunk_size import chunk_of
from lowering.machine.target import Target
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

_LANES = 128  # of a TPU


@dataclass(frozen=True)
class Sizes:
    """Of what one device computes in one microbatch."""

    sequences: float
    length: float  # positions between attention and MLP
    inside: float  # positions inside a block
    attended: float  # positions of keys and values at once
    heads: float
    kv_heads: float
    head_dim: int  # as it is laid out
    mlp: float
    vocab: float
    scored: float  # positions whose logits exist at once
    in_chunks: bool  # whether these are fewer than inside
    layers: float
    item: int  # bytes of a number of the computation

    @classmethod
    def of(cls, program: Program, rules: Rules, mesh: MeshShape) -> Sizes:
        model, batch = program.model, program.batch
        assert model.kv_heads and model.head_dim

        def split(size: float, axis: str) -> float:
            return size / mesh.size(rules.activations.get(axis, ()))

        inside, chunk = split(batch.length, "seq"), chunk_of(program, rules, mesh)
        layers = model.layers / mesh.size(rules.parameters.get("layers", ()))
        return cls(
            sequences=split(batch.sequences // batch.microbatches, "batch"),
            length=split(batch.length, "residual"),
            inside=inside,
            attended=split(batch.length, "attended"),
            heads=split(split(model.heads, "heads"), "attention_heads"),
            kv_heads=max(1, split(split(model.kv_heads, "kv_heads"), "attention_kv_heads")),
            head_dim=_as_laid_out(model.head_dim, program),
            mlp=split(model.mlp, "mlp"),
            vocab=split(model.vocab, "vocab"),
            scored=min(chunk or inside, inside),
            in_chunks=chunk is not None,
            layers=layers,
            item=2 if model.dtype == "bfloat16" else 4,
        )


def _as_laid_out(head_dim: int, program: Program) -> int:
    """What a head takes: on a TPU the last dimension of an array fills rows of 128."""
    if Target.parse(program.target).platform != "tpu":
        return head_dim
    return -(-head_dim // _LANES) * _LANES
