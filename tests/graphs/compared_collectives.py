"""Configurations whose predicted collectives are compared with those of the compiled step."""

from dataclasses import replace
from typing import Any

from programs import program

from graphtrain.config.schema import (
    Adapter,
    Batch,
    Loss,
    Mesh,
    MixtureOfExperts,
    Model,
    PipelineSettings,
    Program,
)
from lowering.hlo.collectives import Collective

MODEL = Model(layers=4, embed=512, heads=8, mlp=1024, vocab=4096)
GPT = replace(
    MODEL, positions="learned", max_position_embeddings=256, norm="layer", bias="all",
    activation="gelu_tanh", tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = MixtureOfExperts(experts=8, experts_per_token=2)
FLAT, CUBE = ("data", "fsdp", "tensor"), ("data", "fsdp", "tensor", "sequence")
PIPELINE = ("data", "fsdp", "pipeline", "tensor")


def batch_of(microbatches: int = 1, reduction: str = "per_microbatch", **sizes: Any) -> Batch:
    made = {"global_batch_size": 32, "seq_len": 256} | sizes
    return Batch(microbatches=microbatches, gradient_reduction=reduction, **made)  # type: ignore[arg-type]


Cases = dict[str, dict[str, Any]]


def case(rules: tuple[str, ...], mesh: Mesh, **settings: Any) -> dict[str, Any]:
    return {"rules": rules, "mesh": mesh} | settings


_ON_CUBE = Mesh(data=2, fsdp=2, tensor=2)
CASES: Cases = {
    "data": case(("data",), Mesh(data=8)),
    "data, float32": case(("data",), Mesh(data=8), model=replace(MODEL, dtype="float32")),
    "data, 2 microbatches": case(("data",), Mesh(data=8), batch=batch_of(2)),
    "data, per step": case(("data",), Mesh(data=8), batch=batch_of(2, "per_step")),
    "zero1": case(("zero1",), Mesh(data=8)),
    "zero1, per step": case(("zero1",), Mesh(data=8), batch=batch_of(2, "per_step")),
    "zero2": case(("zero2",), Mesh(data=8), batch=batch_of(2)),
    "fsdp": case(("fsdp",), Mesh(fsdp=8)),
    "fsdp, full remat": case(("fsdp",), Mesh(fsdp=8), model=replace(MODEL, remat="full")),
    "fsdp, no remat": case(("fsdp",), Mesh(fsdp=8), model=replace(MODEL, remat="none")),
    "fsdp, 2 microbatches": case(("fsdp",), Mesh(fsdp=8), batch=batch_of(2)),
    "fsdp, GPT": case(("fsdp",), Mesh(fsdp=8), model=GPT),
    "data and fsdp": case(("data", "fsdp"), Mesh(data=2, fsdp=4)),
    "data and fsdp, per step": case(
        ("data", "fsdp"), Mesh(data=2, fsdp=4), batch=batch_of(2, "per_step")
    ),
    "zero1 and fsdp": case(("zero1", "fsdp"), Mesh(data=2, fsdp=4)),
    "tensor": case(("tensor",), Mesh(tensor=8)),
    "tensor, full remat": case(("tensor",), Mesh(tensor=8), model=replace(MODEL, remat="full")),
    "tensor and sequence": case(CUBE, Mesh(tensor=8)),
    "tensor and sequence, chunks": case(CUBE, Mesh(tensor=8), loss=Loss(chunk=128)),
    "pipeline and tensor, chunks": case(
        PIPELINE, Mesh(stage=2, data=2, tensor=2), batch=batch_of(4), loss=Loss(chunk=128)
    ),
    "data and tensor": case(FLAT, Mesh(data=4, tensor=2)),
    "data and tensor, GPT": case(FLAT, Mesh(data=4, tensor=2), model=GPT),
    "data, tensor and sequence": case(CUBE, Mesh(data=4, tensor=2)),
    "fsdp and tensor": case(FLAT, Mesh(fsdp=4, tensor=2)),
    "fsdp, tensor and sequence": case(CUBE, Mesh(fsdp=4, tensor=2)),
    "cube": case(FLAT, _ON_CUBE),
    "cube and sequence": case(CUBE, _ON_CUBE),
    "cube, grouped heads": case(CUBE, _ON_CUBE, model=replace(MODEL, kv_heads=4)),
    "context": case(("data", "context"), Mesh(data=2, context=4)),
    "ulysses": case(("data", "ulysses"), Mesh(data=2, context=4)),
    "fsdp and context": case(("fsdp", "context"), Mesh(fsdp=4, context=2)),
    "pipeline": case(PIPELINE, Mesh(stage=4, data=2), batch=batch_of(8)),
    "pipeline, 1f1b": case(
        PIPELINE, Mesh(stage=2, data=4), batch=batch_of(4),
        pipeline=PipelineSettings(schedule="1f1b"),
    ),
    "pipeline and context, 1f1b": case(
        ("data", "context", "pipeline"), Mesh(data=2, context=2, stage=2), batch=batch_of(4),
        pipeline=PipelineSettings(schedule="1f1b"),
    ),
    "pipeline and tensor": case(
        PIPELINE, Mesh(stage=2, data=2, tensor=2), batch=batch_of(4)
    ),
    "pipeline, interleaved": case(
        PIPELINE, Mesh(stage=2, data=4), batch=batch_of(4),
        pipeline=PipelineSettings(schedule="1f1b", virtual_stages=2),
    ),
    "pipeline, circular": case(
        PIPELINE, Mesh(stage=2, data=4), batch=batch_of(4),
        pipeline=PipelineSettings(virtual_stages=2),
    ),
    "experts": case(
        ("data", "expert"), Mesh(data=2, expert=4), model=replace(MODEL, moe=EXPERTS)
    ),
    "dense layers in a pipeline": case(
        PIPELINE, Mesh(stage=2, data=2, tensor=2), batch=batch_of(4),
        model=replace(MODEL, moe=replace(EXPERTS, dense_layers=2, dense_mlp=2048)),
    ),
    "multi-token prediction": case(
        ("fsdp",), Mesh(fsdp=8), model=replace(MODEL, mtp_loss_weight=0.3)
    ),
    "pipeline and context, 1f1b, packed": case(
        ("data", "context", "pipeline"), Mesh(data=2, context=2, stage=2),
        batch=batch_of(4, cross_document_attention=False),
        pipeline=PipelineSettings(schedule="1f1b"),
    ),
    "experts with a capacity": case(
        ("data", "expert"),
        Mesh(data=2, expert=4),
        model=replace(MODEL, moe=replace(EXPERTS, capacity_factor=1.25)),
    ),
    "LoRA": case(("data", "fsdp"), Mesh(fsdp=8), adapter=Adapter(rank=8, alpha=16)),
    "wide, fsdp": case(
        ("fsdp",), Mesh(fsdp=8), model=replace(MODEL, layers=2, embed=1024, mlp=2816, heads=16),
        batch=batch_of(seq_len=1024),
    ),
    "wide, cube": case(
        CUBE, Mesh(data=2, fsdp=2, tensor=2), batch=batch_of(2, global_batch_size=16, seq_len=512),
        model=replace(MODEL, layers=2, embed=1024, mlp=2816, heads=16, kv_heads=4, vocab=32000),
    ),
    "small vocabulary": case(
        ("data", "fsdp"), Mesh(data=2, fsdp=4), model=replace(MODEL, vocab=256)
    ),
    "zero2, per step": case(("zero2",), Mesh(data=8), batch=batch_of(4, "per_step")),
    "fsdp, context and tensor": case(
        ("fsdp", "context", "tensor", "sequence"), Mesh(fsdp=2, context=2, tensor=2)
    ),
    "pipeline and fsdp": case(PIPELINE, Mesh(stage=2, fsdp=4), batch=batch_of(4)),
    "zero1 and tensor": case(("zero1", "tensor"), Mesh(data=4, tensor=2)),
    "experts and fsdp": case(
        ("fsdp", "expert"), Mesh(fsdp=2, expert=4), model=replace(MODEL, moe=EXPERTS)
    ),
    "pipeline and tensor, full remat": case(
        PIPELINE, Mesh(stage=2, data=2, tensor=2), batch=batch_of(8),
        model=replace(MODEL, remat="full"),
    ),
    "pipeline and tensor, no remat": case(
        PIPELINE, Mesh(stage=2, data=2, tensor=2), batch=batch_of(8),
        model=replace(MODEL, remat="none"),
    ),
    "pipeline and tensor, 1f1b": case(
        PIPELINE, Mesh(stage=2, tensor=4), batch=batch_of(4),
        pipeline=PipelineSettings(schedule="1f1b"),
    ),
    "pipeline and fsdp, 1f1b": case(
        PIPELINE, Mesh(stage=4, fsdp=2), batch=batch_of(8),
        pipeline=PipelineSettings(schedule="1f1b"),
    ),
    "pipeline and fsdp, full remat": case(
        PIPELINE, Mesh(stage=2, fsdp=4), batch=batch_of(4), model=replace(MODEL, remat="full")
    ),
    "pipeline, fsdp and data, GPT": case(
        PIPELINE, Mesh(data=2, fsdp=2, stage=2), batch=batch_of(4), model=GPT
    ),
    "pipeline, vocabulary on stages": case(
        (*PIPELINE, "stage_vocab"), Mesh(data=2, fsdp=2, stage=2), batch=batch_of(4)
    ),
    "fsdp, small vocabulary": case(
        ("fsdp",), Mesh(fsdp=8), model=replace(MODEL, vocab=256), batch=batch_of(seq_len=1024)
    ),
}  # fmt: skip


def compared_program(name: str, target: str, cases: Cases = CASES) -> Program:
    """Return the program of a case for a target of 8 devices."""
    return program(target=target, **{"model": MODEL, "batch": batch_of()} | cases[name])


def listed(collectives: tuple[Collective, ...]) -> set[tuple[str, str]]:
    """Return mesh axes and operation of all collectives above 1 kB."""
    return {
        ("+".join(one.axes), one.op) for one in collectives if one.bytes >= 1000 and one.devices > 1
    }


def sent(collectives: tuple[Collective, ...]) -> float:
    """Return the bytes that one device sends in a step."""
    return sum(one.wire_bytes_per_step for one in collectives)
