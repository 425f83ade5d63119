"""Findings of a plan: what a step computes or holds in vain, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import TorchModel, is_imported
from graphtrain.cost_model.compute import (
    PartFlops,
    computes_all_experts,
    expected_excess,
    flops_by_part,
    replicated,
    step_flops,
)
from graphtrain.cost_model.idle_settings import idle_settings
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.update_flops import update_flops
from graphtrain.models.attention.kernel_support import (
    attention_of_step,
    step_uses_flash_kernel,
    why_no_kernel,
)
from graphtrain.models.flops import Part

# More compiled FLOPs than this, over those that have a known cause, are a finding.
EXCESS = 1.2
# Array axis whose split would divide the work of a part.
_AXIS_THAT_DIVIDES: dict[Part, str] = {
    "attention projections": "heads",
    "attention scores": "heads",
    "MLP": "mlp",
    "LM head": "vocab",
}


def findings(
    program: ResolvedProgram, excess: float | None, *, is_estimate: bool
) -> tuple[str, ...]:
    """Return one sentence for each finding, with its cause and what to do.

    Args:
        program: the program.
        excess: Compiled FLOPs over those that arithmetic expects; None if they are not known.
        is_estimate: Whether nothing was compiled.
    """
    caveat = _of_estimate(program) if is_estimate else ()
    needless = _needless_flops(program, excess)
    return (*caveat, *_dense_attention(program), *needless, *idle_settings(program))


def _of_estimate(program: ResolvedProgram) -> Iterator[str]:
    """Yield how an imported model differs from the native one that its estimate is of."""
    if not isinstance(program.model, TorchModel):
        return
    from graphtrain.torch_frontend.native_equivalent import estimation_caveat

    if text := estimation_caveat(program.model):
        yield f"the estimate is of a native model of about the same size: {text}."


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


def _repeated_work(program: ResolvedProgram, excess: float | None) -> Iterator[str]:
    """Yield a finding for each set of mesh axes whose devices compute the same."""
    parts = flops_by_part(program, flash=step_uses_flash_kernel(with_padding_layers(program)))
    if excess is not None and excess < _confirming(parts):
        return  # the compiler found a way to divide the work
    for axes, names in replicated(parts).items():
        over, times = " and ".join(axes), program.mesh.size(axes)
        whole = len(names) == len(parts)
        verb = "is" if whole or len(_merged(names)) == 1 else "are"
        rule = "batch" if whole else _AXIS_THAT_DIVIDES[names[0]]
        remedy = f"[activations] {rule} = {axes[0]!r} in a rule table divides the work."
        if "stage" in axes:
            remedy = 'Add "pipeline" to program.rules, which divides the layers over the stages.'
        yield (
            f"{'the whole step' if whole else _joined(names)} {verb} computed {times} x over "
            f"{over}: no rule splits activations there, so {times} devices compute the same. "
            f"{remedy}"
        )


def _confirming(parts: Sequence[PartFlops]) -> float:
    """Return the excess from which a compiled program can be said to repeat work as expected."""
    ideal = sum(part.ideal for part in parts)
    return (1 + sum(part.computed for part in parts) / ideal) / 2


def _merged(names: Sequence[Part]) -> list[str]:
    """Return the names of parts as they stand in a sentence; both of attention are one."""
    attention = [name for name in names if name.startswith("attention")]
    others = [f"the {name}" for name in names if name not in attention]
    return (["attention"] if len(attention) == 2 else [*attention]) + others


def _joined(names: Sequence[Part]) -> str:
    *firsts, last = _merged(names)
    return f"{', '.join(firsts)} and {last}" if firsts else last


def _needless_flops(program: ResolvedProgram, excess: float | None) -> Iterator[str]:
    native = with_padding_layers(program)
    moe, flash = native.model.moe, step_uses_flash_kernel(native)
    repeats = list(_repeated_work(program, excess))
    yield from repeats
    if moe is not None and (reason := computes_all_experts(program)):
        share = excess if excess is not None else expected_excess(program, flash=flash)
        remedy = " Set program.model.moe.capacity_factor, for example to 1.25."
        yield (
            f"the mixture computes {moe.experts} experts for each token's "
            f"{moe.experts_per_token}: {reason}. The whole step computes {share:.1f} x the FLOPs "
            f"that it would with the chosen experts.{'' if is_imported(program.model) else remedy}"
        )
        return
    known = expected_excess(program, flash=flash)
    if not repeats:  # of the model; the optimizer's products are expected
        model = step_flops(program, flash=flash, masked=False)
        known = 1 + update_flops(program) / model
    if excess is not None and excess > EXCESS * known:
        cause = "no known cause; compare the step without parts of its settings (plan diff)"
        if moe is not None and (capacity := moe.capacity_factor or 0) > 1:
            cause = (
                f"moe.capacity_factor = {capacity:g} gives each expert that many times its mean "
                "number of slots, and empty slots are computed"
            )
        repeated = " and that repetition" if repeats else ""
        yield (
            f"the compiled step computes {excess / known:.2f} x the FLOPs of the model with its "
            f"recomputation{repeated}: {cause}."
        )
