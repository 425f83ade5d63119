"""Rows of published_steps.toml as programs of graphtrain, with the seconds that were published."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from graphtrain.config.schema import (
    Batch,
    Loss,
    Mesh,
    Model,
    PipelineSettings,
    Precision,
    Program,
)
from graphtrain.config.schema.model import MixtureOfExperts

ROWS = Path(__file__).parents[1] / "benchmarks" / "published_steps.toml"
Remat = Literal["full", "none", "dots", "attention"]
REMAT: dict[str, Remat] = {
    "full": "full",
    "none": "none",
    "none (no recompute flag in the script)": "none",
    "minimal (saves matmul outputs)": "dots",
    "save matmul outputs (SAVE_DOT_WITH_NO_BATCH_DIM)": "dots",
    "selective attention + sequence parallel": "attention",
    "selective (attention)": "attention",
}
Kernel = Literal["flash", "cuDNN", "none"]
# Attention as a row names it.
KERNELS: dict[str, Kernel] = {
    "dense": "none",
    "flash": "flash",
    "flash (splash)": "flash",
    "flash (tokamax splash)": "flash",
    "cuDNN": "cuDNN",
}


class NotModelled(Exception):
    """A row needs what the planner or the native model does not have."""


def read_rows() -> list[dict[str, Any]]:
    """Return the rows of the table."""
    return tomllib.loads(ROWS.read_text())["row"]


def kernel_of(row: Mapping[str, Any]) -> Kernel:
    """Return the kind of attention kernel; presumed by the stack where a row does not say it.

    NVIDIA's stacks call cuDNN's; Korthikanti et al., Megatron-LM of 2021 and Pax without
    Transformer Engine have none.
    """
    if "attention" in row:
        return KERNELS[row["attention"]]
    name = row["name"]
    without = name.startswith(("korthikanti", "megatron-2021"))
    if without or (name.startswith("pax") and "Engine" not in name):
        return "none"
    return "cuDNN" if row["source"].startswith("NVIDIA/") else "flash"


def published_seconds(row: Mapping[str, Any]) -> float:
    """Return the seconds of a step, from whichever of its forms the source gives.

    Raises:
        NotModelled: only a utilization is given, whose FLOPs the convention decides.
    """
    result, sequences = row["result"], row["global_batch"]
    tokens = sequences * row["seq_len"]
    if "step_seconds" in result:
        return result["step_seconds"]
    if "tokens_per_second_per_chip" in result:
        return tokens / (result["tokens_per_second_per_chip"] * row["chips"])
    if "sequences_per_second" in result:
        return sequences / result["sequences_per_second"]
    flops = flops_per_token(row)
    return tokens * flops / (result["tflops_per_second_per_chip"] * 1e12 * row["chips"])


def flops_per_token(row: Mapping[str, Any]) -> float:
    """Return the FLOPs per token by which a source converts seconds into FLOP/s.

    Raises:
        NotModelled: the source does not say how.
    """
    model, length = row["model"], row["seq_len"]
    layers, hidden = model["layers"], model["hidden"]
    parameters = model.get("parameters_computed", 0)
    scores = layers * model["heads"] * model.get("head_dim", 0) * length
    head = 6 * model["vocab"] * hidden
    formulas = {
        "6*N + 6*layers*heads*head_dim*S": 6 * parameters + 6 * scores,
        "6*N + 12*layers*heads*head_dim*S": 6 * parameters + 12 * scores,
        # Narayanan et al. 2021, section 5.1, https://arxiv.org/abs/2104.04473: the second with
        # the recomputed forward pass, which the head is not part of.
        "72*L*h^2*(1 + S/(6h) + V/(12*L*h))": 72 * layers * hidden**2 + 12 * scores + head,
        "96*L*h^2*(1 + S/(6h) + V/(16*L*h))": 96 * layers * hidden**2 + 16 * scores + head,
    }
    for formula, flops in formulas.items():
        if formula in row["convention"] and "tflops_per_second_per_chip" in row["result"]:
            return flops
    raise NotModelled("the source gives FLOP/s or a utilization, and not the formula")


def program_of(row: Mapping[str, Any]) -> Program:
    """Return a row as settings of a program.

    A published 1F1B pipeline, interleaved or not, is the circular schedule: that has its bubble,
    (stages - 1) / (stages - 1 + microbatches * virtual stages), and saves activations. graphtrain's
    own 1F1B recomputes stages. Published full recomputation computes a layer once more, not twice.
    Published stacks have neither graphtrain's chunks of the loss nor its blocks of MLPs.

    Raises:
        NotModelled: a recomputation or a part of the model is not expressible.
        ValueError: the sizes do not fit together.
    """
    if ":" not in row["target"] or " " in row["target"]:
        raise NotModelled(f"{row['target']} is not a target")
    sizes = {name: size for name, size in row["mesh"].items() if size > 1}
    return Program(
        target=row["target"],
        mesh=Mesh(**sizes),
        model=model_of(row),
        precision=Precision(compute=narrow_dtype(row) or "bfloat16"),
        batch=Batch(
            global_batch_size=row["global_batch"],
            seq_len=row["seq_len"],
            microbatches=row.get("microbatches", 1),
        ),
        loss=Loss(chunk="none"),
        pipeline=PipelineSettings(
            virtual_stages=row.get("virtual_stages", 1), recompute_stages=False
        ),
    )


def narrow_dtype(row: Mapping[str, Any]) -> Literal["fp8", "int8"] | None:
    """Return the dtype of 8 bits of a row's products, of whatever recipe."""
    precision = row.get("precision", "bf16")
    for dtype in ("fp8", "int8"):
        if precision.startswith(dtype):
            return dtype
    return None


def remat_of(row: Mapping[str, Any]) -> Remat:
    """Return the recomputation of a row; none if it is not stated.

    Selective recomputation in a pipeline is taken for none. graphtrain's pipelines recompute the
    whole stage with it, the published ones only attention's scores, a few percent of a step.

    Raises:
        NotModelled: a recomputation without a counterpart.
    """
    stated = row.get("remat", "none")
    if stated not in REMAT:
        raise NotModelled(f"recomputation: {stated}")
    remat = REMAT[stated]
    return "none" if remat == "attention" and row["mesh"]["stage"] > 1 else remat


def model_of(row: Mapping[str, Any]) -> Model:
    """Return the native model with the sizes of a row's.

    Raises:
        NotModelled: attention of another kind, or a recomputation without a counterpart.
    """
    sizes = row["model"]
    if "kv_lora_rank" in sizes or "sliding_window" in sizes:
        raise NotModelled("multi-head latent attention, or a window with a kernel")
    learned = sizes.get("learned_positions", False)
    experts = None
    if "experts" in sizes:
        experts = MixtureOfExperts(experts=sizes["experts"], experts_per_token=sizes["top_k"])
    return Model(
        layers=sizes["layers"],
        embed=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"] * row.get("kv_heads_replicated", 1),
        head_dim=sizes.get("head_dim"),
        mlp=sizes.get("moe_mlp", sizes["mlp"]),
        vocab=sizes["vocab"],
        activation="swiglu" if sizes["gated"] else "gelu_tanh",
        bias="all" if sizes.get("biases") else "none",
        positions="learned" if learned else "rope",
        max_position_embeddings=row["seq_len"] if learned else None,
        norm="layer" if learned else "rms",
        tie_word_embeddings=sizes.get("tied_embeddings", False),
        moe=experts,
        remat=remat_of(row),
        mlp_blocks="none",
        attention="dense" if kernel_of(row) == "none" else "auto",
    )
