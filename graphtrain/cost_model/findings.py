"""Findings of a plan: what a step computes or holds that its model does not need."""

from __future__ import annotations

from collections.abc import Iterator

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.models.attention.kernel_support import attention_of_step, why_no_kernel
from graphtrain.models.flops import expert_flops_per_token, step_flops_per_token
from graphtrain.models.grouped_matmul_support import step_computes_all_experts

# More compiled FLOPs than this, over those of the model with its recomputation, have a cause.
EXCESS = 1.2


def findings(program: ResolvedProgram, excess: float | None) -> tuple[str, ...]:
    """Return one sentence for each finding, with its cause and what to do.

    Args:
        program: the program.
        excess: Compiled FLOPs over those that arithmetic expects; None if nothing was compiled.
    """
    return (*_dense_attention(program), *_needless_flops(program, excess))


def expected_excess(program: ResolvedProgram) -> float:
    """Return the excess of FLOPs that arithmetic expects, for a step that is not compiled."""
    native = with_padding_layers(program)
    moe = native.model.moe
    if moe is None or not _computes_all_experts(program):
        return 1.0
    repeated = expert_flops_per_token(native.model) * (moe.experts - 1)
    if is_imported(program.model):  # each token once, not each of its choices
        repeated = expert_flops_per_token(native.model) * (moe.experts / moe.experts_per_token - 1)
    return 1 + repeated / step_flops_per_token(native.settings)


def _dense_attention(program: ResolvedProgram) -> Iterator[str]:
    """Yield a finding if "auto" finds no flash kernel on a machine that should have one."""
    native = with_padding_layers(program)
    spec, target = attention_of_step(native), program.target
    if program.model.attention != "auto" or target.platform not in ("cuda", "rocm", "tpu"):
        return
    reason = why_no_kernel(spec, target)
    if not reason or spec.sharded_positions:  # ring attention has scores of one block at a time
        return
    sizes = DeviceSizes.of(native)
    elements = sizes.sequences * sizes.heads * sizes.seq_in_block * sizes.kv_positions
    yield (
        f"attention has no flash kernel and holds all scores: {reason}. The float32 scores of one "
        f"layer take {4 * elements / 1e6:,.1f} MB of a device and grow with the square of the "
        'sequence length. program.model.attention = "flash" makes this an error.'
    )


def _needless_flops(program: ResolvedProgram, excess: float | None) -> Iterator[str]:
    native = with_padding_layers(program)
    moe = native.model.moe
    if moe is not None and (reason := _computes_all_experts(program)):
        share = excess if excess is not None else expected_excess(program)
        yield (
            f"the mixture computes {moe.experts} experts for each token's "
            f"{moe.experts_per_token}: {reason}. The step computes {share:.1f} x the FLOPs of the "
            "chosen experts. Set program.model.moe.capacity_factor, for example to 1.25."
        )
    elif excess is not None and excess > EXCESS:
        cause = "no known cause; compare the step without parts of its settings (plan diff)"
        if moe is not None and (capacity := moe.capacity_factor or 0) > 1:
            cause = (
                f"moe.capacity_factor = {capacity:g} gives each expert that many times its mean "
                "number of slots, and empty slots are computed"
            )
        yield (
            f"the compiled step computes {excess:.2f} x the FLOPs of the model with its "
            f"recomputation: {cause}."
        )


def _computes_all_experts(program: ResolvedProgram) -> str:
    if is_imported(program.model) and program.target.platform != "tpu":
        return f"imported mixtures have no grouped matrix product on {program.target}"
    return step_computes_all_experts(with_padding_layers(program))
