"""Time of a step that is not compiled, at the speeds that the profile of this machine has.

Its products have the sizes of the matrices of each part on one device. What operations between
products read and write comes from memory. What takes time besides, functions of elements and
starting operations, is only known of a compiled step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import StepTime
from graphtrain.cost_model.compute import flops_by_part
from graphtrain.cost_model.elementwise import elementwise_bytes
from graphtrain.cost_model.machine_profile import MachineProfile
from graphtrain.cost_model.measured_time import (
    CoreShare,
    PartSeconds,
    collective_seconds,
    product_seconds,
    seconds_per_byte,
)
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.traffic import bubble_of
from graphtrain.cost_model.update_flops import update_flops
from graphtrain.models.flops import Part
from lowering.hlo.work import Product

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective

_HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def time_at_speeds_of(
    profile: MachineProfile,
    time: StepTime,
    program: ResolvedProgram,
    collectives: Iterable[Collective],
    moved_bytes: float,
) -> StepTime:
    """Return an estimate of a step's time with the seconds of a profile.

    Args:
        profile: What was measured of the machine.
        time: The estimate without it.
        program: The program, with a native model.
        collectives: Predicted.
        moved_bytes: What a device reads and writes outside of products.

    Raises:
        KeyError: the profile lacks a dtype of products or a collective.
    """
    share = CoreShare(program.target.devices, profile.cores)
    compute = share.of(_seconds_of_products(program, profile), profile.cores).clock
    per_byte = seconds_per_byte(round(moved_bytes), profile)
    between_products = elementwise_bytes(program, flash=False) * per_byte
    sent: dict[str, PartSeconds] = {}
    for one in collectives:
        axes = "+".join(one.axes)
        seconds = share.of(one.count * collective_seconds(one, profile), 1)
        sent[axes] = sent.get(axes, PartSeconds()) + seconds
    in_ticks = compute + share.of(between_products, profile.cores).clock
    bubble = bubble_of(program)
    return replace(
        time,
        compute=compute,
        memory=share.of(moved_bytes * per_byte, profile.cores).clock,
        communication={axes: seconds.clock for axes, seconds in sent.items()},
        bubble=in_ticks * bubble / (1 - bubble),  # in which devices compute on zeros
        overlapped=0.0,  # devices share the cores
        profile_note="",
        speeds=profile.source,
    )


def _seconds_of_products(program: ResolvedProgram, profile: MachineProfile) -> float:
    """Return the processor time of a device's products."""
    seconds = flops = 0.0
    for part in flops_by_part(program, flash=False):
        product = _product(part.name, program)
        of_part = part.computed / program.target.devices
        seconds += of_part * product_seconds(product, profile) / product.flops
        flops += of_part
    updates = update_flops(program) / program.target.devices
    return seconds * (1 + updates / flops)


def _product(part: Part, program: ResolvedProgram) -> Product:
    """Return the product of a part of the model that most of its operations are in."""
    model, sizes = program.model, DeviceSizes.of(program)
    dtype = _HLO_DTYPES[model.dtype]
    tokens = max(1, round(sizes.sequences * sizes.seq_in_block))
    if part == "attention scores":
        heads = max(1, round(sizes.sequences * sizes.heads))
        rows, keys = max(1, round(sizes.seq_in_block)), max(1, round(sizes.kv_positions))
        return Product(heads, rows, sizes.head_dim, keys, dtype)
    columns = {
        "attention projections": sizes.heads * sizes.head_dim,
        "MLP": sizes.mlp,
        "LM head": sizes.vocab,
    }
    return Product(1, tokens, model.embed, max(1, round(columns[part])), dtype)
