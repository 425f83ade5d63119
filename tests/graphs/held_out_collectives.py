"""Configurations by target, fixed before their compiled collectives were looked at.

Of FIRST, what differed was then mended where its cause was understood; SECOND was made after that.
"""

from dataclasses import replace
from typing import Any

from compared_collectives import (
    CUBE,
    EXPERTS,
    FLAT,
    GPT,
    MODEL,
    PIPELINE,
    Cases,
    batch_of,
    case,
)

from graphtrain.config.schema import Adapter, Mesh, PipelineSettings

GROUPED = replace(MODEL, kv_heads=4)
TIED = replace(MODEL, tie_word_embeddings=True)
GEMMA = replace(
    TIED, activation="geglu_tanh", qk_norm=True, post_norm=True, rms_norm_offset=True,
    scaled_embedding=True, head_dim=128, heads=4, kv_heads=2,
)  # fmt: skip
MIXED = replace(MODEL, moe=EXPERTS)
PACKED: dict[str, Any] = {"cross_document_attention": False}
LORA = Adapter(rank=8, alpha=16)

FIRST: dict[str, Cases] = {
    "h100:8": {
        "fsdp, GQA, packed": case(
            ("fsdp",), Mesh(fsdp=8), model=replace(MODEL, kv_heads=2), batch=batch_of(**PACKED)
        ),
        "fsdp, tied, 4 microbatches": case(
            ("fsdp",), Mesh(fsdp=8), model=TIED, batch=batch_of(4, global_batch_size=64)
        ),
        "data, GPT, packed, 2 microbatches": case(
            ("data",), Mesh(data=8), model=GPT, batch=batch_of(2, **PACKED)
        ),
        "data and tensor 4, GQA, 32000": case(
            FLAT, Mesh(data=2, tensor=4), model=replace(GROUPED, vocab=32000)
        ),
        "fsdp, tensor, sequence, tied, 2 microbatches": case(
            CUBE, Mesh(fsdp=4, tensor=2), model=TIED, batch=batch_of(2)
        ),
        "MoE on fsdp": case(("fsdp",), Mesh(fsdp=8), model=MIXED),
        "MoE with capacity, 2 microbatches": case(
            ("data", "expert"),
            Mesh(data=4, expert=2),
            model=replace(MODEL, moe=replace(EXPERTS, capacity_factor=1.5)),
            batch=batch_of(2),
        ),
        "MoE, shared expert": case(
            ("data", "expert"),
            Mesh(data=2, expert=4),
            model=replace(MODEL, moe=replace(EXPERTS, shared_expert_mlp=512)),
        ),
        "LoRA, fsdp and tensor": case(FLAT, Mesh(fsdp=4, tensor=2), adapter=LORA),
        "QLoRA, fsdp": case(("fsdp",), Mesh(fsdp=8), adapter=replace(LORA, base_dtype="nf4")),
        "fsdp, ulysses, GQA": case(("fsdp", "ulysses"), Mesh(fsdp=4, context=2), model=GROUPED),
        "pipeline 4, tensor, GQA": case(
            PIPELINE, Mesh(stage=4, tensor=2), model=GROUPED, batch=batch_of(8)
        ),
        "pipeline, 2 virtual stages": case(
            PIPELINE,
            Mesh(stage=2, data=4),
            batch=batch_of(4),
            pipeline=PipelineSettings(virtual_stages=2),
        ),
    },
    "cpu:8": {
        "fsdp, GPT, 2 microbatches": case(("fsdp",), Mesh(fsdp=8), model=GPT, batch=batch_of(2)),
        "data, GQA, packed, per step": case(
            ("data",), Mesh(data=8), model=GROUPED, batch=batch_of(4, "per_step", **PACKED)
        ),
        "fsdp, tensor, GQA, tied": case(
            FLAT, Mesh(fsdp=4, tensor=2), model=replace(TIED, kv_heads=4)
        ),
        "MoE, 2 microbatches": case(
            ("data", "expert"), Mesh(data=2, expert=4), model=MIXED, batch=batch_of(2)
        ),
        "LoRA, data and tensor": case(FLAT, Mesh(data=4, tensor=2), adapter=LORA),
        "fsdp, context, 2 microbatches": case(
            ("fsdp", "context"), Mesh(fsdp=4, context=2), batch=batch_of(2)
        ),
        "data, ulysses, packed": case(
            ("data", "ulysses"), Mesh(data=4, context=2), batch=batch_of(**PACKED)
        ),
        "gpipe, fsdp, tensor": case(
            PIPELINE,
            Mesh(stage=2, fsdp=2, tensor=2),
            batch=batch_of(4),
            pipeline=PipelineSettings(schedule="gpipe"),
        ),
        "zero1, tensor, sequence, 2 microbatches": case(
            ("zero1", "tensor", "sequence"), Mesh(data=4, tensor=2), batch=batch_of(2)
        ),
        "fsdp, Gemma": case(("fsdp",), Mesh(fsdp=8), model=GEMMA),
    },
    "v5e:2x4": {
        "fsdp, GQA": case(("fsdp",), Mesh(fsdp=8), model=GROUPED),
        "fsdp 2, tensor 4": case(FLAT, Mesh(fsdp=2, tensor=4)),
        "zero1, 2 microbatches": case(("zero1",), Mesh(data=8), batch=batch_of(2)),
        "fsdp, tied, 2 microbatches": case(("fsdp",), Mesh(fsdp=8), model=TIED, batch=batch_of(2)),
        "MoE": case(("data", "expert"), Mesh(data=2, expert=4), model=MIXED),
    },
}

SECOND: dict[str, Cases] = {
    "h100:8": {
        "1f1b, fsdp, tensor, GQA": case(
            PIPELINE,
            Mesh(stage=2, fsdp=2, tensor=2),
            model=replace(MODEL, kv_heads=2),
            batch=batch_of(4),
            pipeline=PipelineSettings(schedule="1f1b"),
        ),
        "zero2, tensor, tied, 2 microbatches": case(
            ("zero2", "tensor"),
            Mesh(data=4, tensor=2),
            model=replace(MODEL, tie_word_embeddings=True),
            batch=batch_of(2),
        ),
        "LoRA int8, data, tensor, packed": case(
            FLAT,
            Mesh(data=4, tensor=2),
            adapter=replace(LORA, base_dtype="int8"),
            batch=batch_of(**PACKED),
        ),
        "fsdp, ulysses, full remat, packed": case(
            ("fsdp", "ulysses"),
            Mesh(fsdp=2, context=4),
            model=replace(MODEL, remat="full"),
            batch=batch_of(**PACKED),
        ),
        "MoE, fsdp, tensor": case(
            ("fsdp", "expert", "tensor"), Mesh(fsdp=2, expert=2, tensor=2), model=MIXED
        ),
    },
    "cpu:8": {
        "cube, GPT, 2 microbatches": case(
            FLAT, Mesh(data=2, fsdp=2, tensor=2), model=GPT, batch=batch_of(2)
        ),
        "2 virtual stages, tensor, sequence": case(
            (*PIPELINE, "sequence"),
            Mesh(data=2, stage=2, tensor=2),
            batch=batch_of(4),
            pipeline=PipelineSettings(virtual_stages=2),
        ),
        "MoE in a pipeline": case(
            ("data", "expert", "pipeline"),
            Mesh(data=2, stage=2, expert=2),
            model=MIXED,
            batch=batch_of(4),
        ),
        "zero1, fsdp, context": case(("zero1", "fsdp", "context"), Mesh(data=2, fsdp=2, context=2)),
        "QLoRA, fsdp, tensor, GQA": case(
            FLAT,
            Mesh(fsdp=4, tensor=2),
            model=replace(MODEL, kv_heads=4),
            adapter=replace(LORA, base_dtype="nf4"),
        ),
    },
}
