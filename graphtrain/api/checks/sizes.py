"""Sizes that the mesh does not divide, by the names of their settings."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from graphtrain.api.checks.problem import Problem
from graphtrain.config.lines import KeyPath
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from sharding_rules.plan import common_divisors
from sharding_rules.rules import Table

_BATCH: KeyPath = ("program", "batch", "global_batch_size")
_MICROBATCHES: KeyPath = ("program", "batch", "microbatches")
# Array axis: setting that has its size.
_SETTINGS: dict[str, KeyPath] = {
    "batch": _BATCH,
    "embed": ("program", "model", "embed"),
    "experts": ("program", "model", "moe", "experts"),
    "head_dim": ("program", "model", "head_dim"),
    "heads": ("program", "model", "heads"),
    "kv_heads": ("program", "model", "kv_heads"),
    "layers": ("program", "model", "layers"),
    "mlp": ("program", "model", "mlp"),
    "positions": ("program", "model", "max_position_embeddings"),
    "rank": ("program", "adapter", "rank"),
    "residual": ("program", "batch", "seq_len"),
    "seq": ("program", "batch", "seq_len"),
    "shared": ("program", "model", "moe", "shared_expert_mlp"),
    "vocab": ("program", "model", "vocab"),
}


class _Dimension(NamedTuple):
    """One dimension of arrays: its axis, its size, and the rules that split it."""

    axis: str
    size: int
    table: Table


def size_problems(program: ResolvedProgram) -> Iterator[Problem]:
    """Yield each setting whose size is not a multiple of its shards, once."""
    yield from _problems(program, _dimensions(program))
    yield from _ring_problems(program)
    yield from _exchange_problems(program)


def batch_size_problems(program: ResolvedProgram) -> Iterator[Problem]:
    """Yield those of the settings of [program.batch]."""
    yield from _problems(program, _batch_dimensions(program))
    yield from _ring_problems(program)


def _ring_problems(program: ResolvedProgram) -> Iterator[Problem]:
    """Yield a length of sequences of which ring attention cannot give each device two chunks."""
    names = program.rules.activations.get("kv_seq", ())
    names = tuple(one for one in names if program.mesh.axes.get(one, 1) > 1)
    devices, length = program.mesh.size(names), program.batch.seq_len
    if devices == 1 or length % devices or length % (2 * devices) == 0:
        return  # not divided at all, it has another problem
    setting, mesh_axes = _SETTINGS["seq"], [("program", "mesh", name) for name in names]
    lower = length // (2 * devices) * 2 * devices
    sizes = " or ".join(str(one) for one in (lower, lower + 2 * devices) if one)
    axes = " x ".join(".".join(one) for one in mesh_axes)
    message = (
        f"{'.'.join(setting)} = {length} is not a multiple of twice {axes} = {devices}, into which "
        f'ring attention divides sequences; use {sizes}, or "ulysses" instead of "context" in '
        "program.rules"
    )
    yield Problem("program", message, (setting, *mesh_axes))


def _exchange_problems(program: ResolvedProgram) -> Iterator[Problem]:
    """Yield a number of heads that attention by all-to-all cannot divide among devices."""
    rules, mesh = program.rules.activations, program.mesh
    axes = (*rules.get("heads", ()), *rules.get("attention_heads", ()))
    names = tuple(one for one in axes if mesh.axes.get(one, 1) > 1)
    exchanged = mesh.size(rules.get("attention_heads", ()))
    if exchanged == 1 or is_imported(program.model) or program.model.heads % mesh.size(names) == 0:
        return
    yield _indivisible(program, _SETTINGS["heads"], program.model.heads, names)


def _problems(program: ResolvedProgram, dimensions: Iterator[_Dimension]) -> Iterator[Problem]:
    reported: set[tuple[KeyPath, tuple[str, ...]]] = set()
    for axis, size, table in dimensions:
        names = tuple(one for one in table.get(axis, ()) if program.mesh.axes.get(one, 1) > 1)
        setting = _SETTINGS.get(axis)
        if setting is None or size % program.mesh.size(names) == 0:
            continue
        if (setting, names) in reported or _follows(program, setting, names, reported):
            continue
        reported.add((setting, names))
        yield _indivisible(program, setting, size, names)


def _follows(
    program: ResolvedProgram,
    setting: KeyPath,
    names: tuple[str, ...],
    reported: set[tuple[KeyPath, tuple[str, ...]]],
) -> bool:
    """Return whether a setting is by default another one, which is reported."""
    if setting != _SETTINGS["kv_heads"] or program.model.kv_heads != program.model.heads:
        return False
    return (_SETTINGS["heads"], names) in reported


def _dimensions(program: ResolvedProgram) -> Iterator[_Dimension]:
    yield from _batch_dimensions(program)
    if is_imported(program.model):
        return  # its arrays are known once PyTorch has built it
    from graphtrain.models.shapes import parameter_arrays

    for path, spec in parameter_arrays(program.model).items():
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            if axis is not None and not (axis == "layers" and program.stages):
                for table in _tables(program, path):
                    yield _Dimension(axis, size, table)


def _batch_dimensions(program: ResolvedProgram) -> Iterator[_Dimension]:
    batch, activations = program.batch, program.rules.activations
    rows = batch.microbatch_rows
    for axis, size in {"batch": rows, "seq": batch.seq_len, "residual": batch.seq_len}.items():
        yield _Dimension(axis, size, activations)


def _tables(program: ResolvedProgram, path: str) -> Iterator[Mapping[str, tuple[str, ...]]]:
    rules = program.rules
    for role in ("parameter", "gradient", "optimizer"):
        yield rules.table_for(role, f"state/parameters/{path}")


def _indivisible(
    program: ResolvedProgram, setting: KeyPath, size: int, names: tuple[str, ...]
) -> Problem:
    """Describe a size that is not a multiple of the devices of some mesh axes."""
    shards, mesh_axes = program.mesh.size(names), [("program", "mesh", name) for name in names]
    # Ring attention gives each device two chunks of a sequence.
    chunks = 2 if setting == _SETTINGS["seq"] and program.rules.activations.get("kv_seq") else 1
    multiple = chunks * shards
    lower = size // multiple * multiple
    factor = program.batch.microbatches if setting == _BATCH else 1
    value = f"{'.'.join(setting)} = {size * factor}"
    causes = (setting, *mesh_axes)
    if factor > 1:
        value = f"{value} / microbatches = {factor}, which is {size},"
        causes = (setting, _MICROBATCHES, *mesh_axes)
    sizes = [str(one * factor) for one in (lower, lower + multiple) if one]
    divisors = ", ".join(
        str(one)
        for one in common_divisors(size, program.mesh.devices)
        if one == 1 or size % (chunks * one) == 0
    )
    axes = " x ".join(".".join(one) for one in mesh_axes)
    message = (
        f"{value} is not a multiple of {axes} = {shards}; use {' or '.join(sizes)}, "
        f"or {axes} = {divisors}"
    )
    return Problem("program", message, causes)
