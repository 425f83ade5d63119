"""Arrays of the optimizer state of each kind, by arithmetic; imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphtrain.config.schema import Optimizer
from graphtrain.models.matrices import STACK_AXES, is_hidden_matrix, matrix_axes
from graphtrain.models.preconditioners import preconditioner_specs
from sharding_rules.arrays import ArraySpec

Z, EMA = "schedule_free/z", "ema"  # parts of the state that begin as copies of the weights
MOMENTS = ("mu", "trace")  # names of first moments in the states of optax


def copies_of_weights(optimizer: Optimizer) -> list[str]:
    """Return the paths of the parts of the state that begin as copies of the weights."""
    copies = {Z: optimizer.kind == "schedule_free", EMA: optimizer.ema_decay is not None}
    return [path for path, is_part in copies.items() if is_part]


def optimizer_arrays(
    parameters: Mapping[str, ArraySpec], optimizer: Optimizer
) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of the optimizer state, by path, without counters.

    Args:
        parameters: ArraySpecs of the trained parameters, by path.
        optimizer: Settings; with `custom`, those of AdamW, because its state is unknown.
    """
    memory = "host" if optimizer.offload_to_host else "device"
    by_part: dict[str, dict[str, ArraySpec]] = {}
    for path, spec in parameters.items():
        parts = _of_kind(spec, optimizer)
        if optimizer.ema_decay is not None:
            parts |= {EMA: spec}
        for part, array in parts.items():
            for stored, spec_of_part in _stored(part, array, optimizer).items():
                placed = replace(spec_of_part, role="optimizer", memory=memory)
                by_part.setdefault(stored, {})[f"{stored}/{path}"] = placed
    return {path: array for arrays in by_part.values() for path, array in arrays.items()}


def is_stored_in_int8(spec: ArraySpec) -> bool:
    """Return whether int8 moments of an array are integers: it has rows, and is no vector."""
    return len([axis for axis in spec.axes if axis not in STACK_AXES]) > 1


def _stored(part: str, array: ArraySpec, optimizer: Optimizer) -> dict[str, ArraySpec]:
    """Return the arrays in which a part of the state is stored: two of a first moment in int8."""
    is_moment = part.rpartition("/")[2] in MOMENTS
    if optimizer.moment_dtype != "int8" or not is_moment:
        return {part: array}
    if not is_stored_in_int8(array):
        return {f"{part}/values": array}
    scales = replace(array, shape=array.shape[:-1], axes=array.axes[:-1])
    return {f"{part}/values": replace(array, dtype="int8"), f"{part}/scales": scales}


def _of_kind(spec: ArraySpec, optimizer: Optimizer) -> dict[str, ArraySpec]:
    """Return the arrays of the state that belong to one parameter, by part of the state."""
    moment, kind = replace(spec, dtype=optimizer.vector_moment_dtype), optimizer.kind
    if kind == "lion":
        return {"lion/mu": moment}
    if kind == "sgd":
        return {"sgd/trace": moment} if optimizer.momentum_or_default else {}
    if kind == "adafactor":
        return _of_adafactor(spec)
    if kind == "schedule_free":
        return {Z: spec, "schedule_free/nu": spec}
    if kind == "muon" and is_hidden_matrix(spec):
        return {"muon/mu": moment}
    if kind == "soap" and is_hidden_matrix(spec):
        squares = soap_squares(spec, optimizer)
        named = {f"soap/{part}": square for part, square in squares.items()}
        return {"soap/mu": moment, "soap/nu": spec, **named}
    adam = f"{kind}/adam" if kind in ("muon", "soap") else "adam"
    return {f"{adam}/mu": moment, f"{adam}/nu": spec}


def soap_squares(spec: ArraySpec, optimizer: Optimizer) -> dict[str, ArraySpec]:
    """Return the preconditioners of a matrix and their eigenbases, by part of SOAP's state."""
    sides = preconditioner_specs(spec, optimizer.max_precondition_dim_or_default)
    return {part: square for side, square in sides.items() for part in (side, f"{side}_basis")}


def _of_adafactor(spec: ArraySpec) -> dict[str, ArraySpec]:
    axes = matrix_axes(spec)
    if axes is None:
        return {"adafactor/variance": spec}
    return {
        "adafactor/rows": _only(spec, axes.stack + axes.rows),
        "adafactor/columns": _only(spec, axes.stack + axes.columns),
    }


def _only(spec: ArraySpec, dimensions: tuple[int, ...]) -> ArraySpec:
    """Return the spec of a mean over all other dimensions."""
    kept = sorted(dimensions)
    shape, axes = ([values[index] for index in kept] for values in (spec.shape, spec.axes))
    return replace(spec, shape=tuple(shape), axes=tuple(axes))
