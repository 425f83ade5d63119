"""Measured numbers in words: each with its spread and how it was measured."""

from __future__ import annotations

from collections.abc import Iterator

from graphtrain.cost_model.machine_profile import RUNS, MachineProfile

_HOW_OVERHEAD = {
    "step": "a call of a program that adds 1 to 1,024 numbers",
    "launch": "an operation more in a loop of 200 iterations",
    "iteration": "an iteration more of such a loop",
    "array": "an array more that a program is given and returns",
}


def lines(profile: MachineProfile) -> Iterator[str]:
    """Yield a line for each number of a profile, under a heading that says how it was measured."""
    yield f"{profile.processor}, {profile.cores} cores: {profile.source}"
    clock = "processor time" if profile.machine == "cpu" else "time by the clock"
    counted = f"median of those of {RUNS} runs with cores at full speed, else the least"
    yield f"{clock}, {counted}; spread: (most - least) / median"
    yield "matrix products of JAX arrays of ones, the larger ones from memory, GFLOP/s of one core:"
    for one in profile.products:
        sizes = f"{one.batch} x {one.rows} x {one.summed} x {one.columns}"
        yield _line(f"{one.dtype} {sizes}", one.flops / one.seconds / 1e9, "GFLOP/s", one.spread)
    yield "loops over float32 arrays, GB/s read and written by one core:"
    for one in profile.memory:
        name = f"{one.kind}, {one.bytes / 1e6:.1f} MB"
        yield _line(name, one.bytes / one.seconds / 1e9, "GB/s", one.spread)
    yield "functions of float32 numbers and moves of elements, ns for each element:"
    for one in profile.functions:
        yield _line(one.kind, one.seconds * 1e9, "ns", one.spread)
    yield "overheads:"
    for name, one in profile.overheads.items():
        yield _line(f"{name}: {_HOW_OVERHEAD[name]}", one.seconds * 1e6, "us", one.spread)
    yield "collectives over virtual devices, each in a loop, microseconds of one device:"
    for one in profile.collectives:
        name = f"{one.op} over {one.devices}, {one.bytes / 1e6:.3f} MB"
        yield _line(name, one.seconds * 1e6, "us", one.spread)


def _line(name: str, value: float, unit: str, spread: float) -> str:
    return f"  {name}: {value:.3g} {unit}, spread {spread:.0%}"
