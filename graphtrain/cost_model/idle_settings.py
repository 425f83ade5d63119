"""Settings of a program that do nothing on its mesh, machine or model, or less than they say."""

from __future__ import annotations

from collections.abc import Iterator

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import PipelineSettings
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.models.attention.kernel_support import attention_of_step


def idle_settings(program: ResolvedProgram) -> Iterator[str]:
    """Yield one sentence for each setting without its usual effect, with what to do.

    Args:
        program: The program, with a model whose sizes are known.
    """
    native = with_padding_layers(program)
    yield from _stages(program)
    yield from _experts(native)
    yield from _narrow_products(program)
    yield from _rank(program, native)
    yield from _window(native)


def _stages(program: ResolvedProgram) -> Iterator[str]:
    stages = program.stages
    if stages is None:
        if program.pipeline != PipelineSettings():
            yield "[program.pipeline] has no effect, because mesh.stage is 1."
        return
    if program.batch.gradient_reduction == "per_step":
        yield 'batch.gradient_reduction = "per_step" has no effect in a pipeline.'
    if stages.padding_fraction:
        rows, layers, chunks = len(stages.rows), sum(stages.layers), len(stages.layers)
        remedy = f"A multiple of {chunks} layers, or fewer stages, would leave none in vain."
        if layers % chunks == 0:
            remedy = "Without pipeline.layers_per_stage all would have the same number."
        yield (
            f"the stages compute {rows} layers for the {layers} that they have: every stage "
            f"computes as many as the longest, {stages.rows_per_chunk}. {remedy}"
        )


def _experts(native: ResolvedProgram) -> Iterator[str]:
    moe, axis = native.model.moe, native.mesh.axes.get("expert", 1)
    if moe is None:
        if axis > 1:
            yield (
                f"mesh.expert = {axis} has no experts to divide; it only divides the batch. Use "
                "mesh.data, whose communication overlaps with compute."
            )
        return
    enough = moe.experts / moe.experts_per_token
    if moe.capacity_factor and moe.capacity_factor < 1:
        yield (
            f"moe.capacity_factor = {moe.capacity_factor:g} drops at least "
            f"{1 - moe.capacity_factor:.0%} of the choices of experts, however they are balanced; "
            "from 1 on, balanced ones fit."
        )
    if moe.capacity_factor and moe.capacity_factor > enough:
        yield (
            f"moe.capacity_factor = {moe.capacity_factor:g} gives each expert more slots than "
            f"there are tokens, and empty ones are computed; {enough:g} drops no token."
        )


def _narrow_products(program: ResolvedProgram) -> Iterator[str]:
    precision, target, dtype = program.settings.precision, program.target, program.model.dtype
    asked = precision.matmul_dtype
    if asked is None or not target.peak_flops(dtype) or target.peak_flops(asked):
        return
    yield (
        f'precision.compute = "{precision.compute}" is predicted at the speed of {dtype}: no '
        f"speed of such products is known of {target.machine}. Without hardware for them, the "
        "compiler computes in wider types, and only the rounding is left."
    )


def _rank(program: ResolvedProgram, native: ResolvedProgram) -> Iterator[str]:
    adapter, width = program.settings.adapter, native.model.embed
    if adapter is not None and adapter.rank >= width:
        yield (
            f"adapter.rank = {adapter.rank} is not below the model's width, {width}: the adapters "
            "have more parameters than the weights that they change. Usual ranks are 8 to 256."
        )


def _window(native: ResolvedProgram) -> Iterator[str]:
    window, length = native.model.sliding_window, native.batch.seq_len
    if window is None or window >= length or not attention_of_step(native).sharded_positions:
        return
    yield (
        f"model.sliding_window = {window} takes as long as none: ring attention (mesh.context) "
        "computes the scores outside of the window, too."
    )
