"""Peak FLOP/s of a step's products: those in fp8 or int8 have another one than model.dtype."""

from __future__ import annotations

from collections.abc import Mapping

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Model
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.models.flops import Part, forward_flops_by_part, is_gated
from lowering.machine.target import AT_PEAK, Achieved


def part_peak(program: ResolvedProgram, part: Part, achieved: Achieved = AT_PEAK) -> float:
    """Return the FLOP/s of all devices for the products of a part; 0.0 if it is unknown.

    Where some of them are in 8 bits, it is the mean over the time at both speeds. A target without
    a peak for 8 bits has that of model.dtype: its compiler falls back to wider operands.

    Args:
        program: the program.
        part: Part of the model.
        achieved: Fractions of the peak that products reach. Default: the peak itself.
    """
    wide = program.target.peak_flops(program.model.dtype) * achieved.products
    asked = program.settings.precision.matmul_dtype
    if asked is None or not (narrow := program.target.peak_flops(asked)) or not wide:
        return wide
    share = quantized_share(program, part)
    return 1 / (share / (narrow * achieved.narrow_products) + (1 - share) / wide)


def step_peak(program: ResolvedProgram, achieved: Achieved = AT_PEAK) -> float:
    """Return the FLOP/s of all devices for the products of a whole step; 0.0 if unknown.

    It is that of model.dtype where the sizes of a model are unknown without building it.
    """
    wide = program.target.peak_flops(program.model.dtype) * achieved.products
    asked = program.settings.precision.matmul_dtype
    if asked is None or not wide or sizes_unknown(program.settings):
        return wide
    flops = forward_flops_by_part(with_padding_layers(program).model, program.batch.seq_len)
    seconds = sum(count / part_peak(program, part, achieved) for part, count in flops.items())
    return sum(flops.values()) / seconds


def quantized_share(program: ResolvedProgram, part: Part) -> float:
    """Return the fraction of a part's FLOPs that program.precision computes in 8 bits."""
    precision = program.settings.precision
    if precision.matmul_dtype is None:
        return 0.0
    arrays = _arrays(with_padding_layers(program).model, part)
    quantized = [
        count for names, count in arrays.items() if not {*names}.intersection(precision.excluded)
    ]
    return sum(quantized) / sum(arrays.values()) if arrays else 0.0


def _arrays(model: Model, part: Part) -> Mapping[tuple[str, ...], float]:
    """Return the relative FLOPs of the arrays of a part, by their names in program.precision."""
    if part == "LM head":
        return {("head",): 1.0}
    if part == "attention projections":
        assert model.kv_heads
        heads = {"query": model.heads, "output": model.heads}
        heads |= {"key": model.kv_heads, "value": model.kv_heads}
        return {(name,): float(count) for name, count in heads.items()}
    if part == "MLP":
        return _mlp(model)
    return {}  # attention scores have no weights


def _mlp(model: Model) -> Mapping[tuple[str, ...], float]:
    size = float(model.embed * model.mlp)
    gate = ("gate",) if is_gated(model) else ()
    if model.fused_gate_up:
        return {("gate_up",): 2 * size, ("down",): size}
    if (mixture := model.moe) is None:
        return {(name,): size for name in (*gate, "up", "down")}
    chosen = mixture.experts_per_token * size
    arrays = {(name, "experts"): chosen for name in (*gate, "up", "down")}
    router = {("router",): float(model.embed * mixture.experts)}
    shared = float(model.embed * (mixture.shared_expert_mlp or 0))
    return arrays | router | {(f"shared_{name}",): shared for name in (*gate, "up", "down")}
