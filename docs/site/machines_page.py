"""The reference of machines, from lowering/machine/topologies.toml."""

from typing import Any

from markdown import table

from lowering.machine.machine_tables import tables

HEAD = """# Machines

Every machine that a [target](../guides/targets.md) can name, with the numbers that plans use,
from `lowering/machine/topologies.toml`. `cpu` is this machine: its memory is read when a command
runs. Numbers are those of one device: a GPU, a TPU chip (of `tpu7x`, half a chip), a NeuronCore
or an NPU (of `ascend910c`, half of one). The network joins hosts, or the groups of hosts that the
link connects; of a TPU it is the data-center network between slices. None of the numbers was
measured by graphtrain. What products and causal attention reach of the peak is fitted to
[published steps](../BENCHMARKS.md#published-steps); a machine without these numbers is taken to
reach what another of its platform does: `h100`, `v5p`, `trn1`, `ascend910b`, and for `a100-40`
what `a100` does.

"""
REACHED = "products", "products_8bit", "attention"
SOURCES = "\n## Sources\n\n"


def page() -> str:
    """Return the page."""
    head = ("machine", "platform", "memory, GB", "bandwidth, GB/s", "bfloat16, TFLOP/s",
            "float32, TFLOP/s", "fp8, TFLOP/s", "int8, TFLOP/s", "link, GB/s", "network, GB/s",
            "host memory, GB/s",            "devices per host",
            "devices per link", "products reach, %", "fp8 and int8 reach, %",
            "attention reaches, %")  # fmt: skip
    rows = [_row(name, one) for name, one in tables().items()]
    sources = [(f"`{name}`", one["source"]) for name, one in tables().items()]
    return HEAD + table(head, rows) + SOURCES + table(("machine", "source"), sources)


def _row(name: str, one: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"`{name}`",
        one["platform"] + (f", simulates {one['simulates']}" if "simulates" in one else ""),
        _scaled(one.get("memory"), 1e9),
        _scaled(one.get("bandwidth"), 1e9),
        _scaled(one["flops"].get("bfloat16"), 1e12),
        *(_scaled(one["flops"].get(dtype), 1e12) for dtype in ("float32", "fp8", "int8")),
        _scaled(one.get("link"), 1e9),
        _scaled(one.get("network"), 1e9),
        _scaled(one.get("host_link"), 1e9),
        str(one.get("per_host", one.get("group", ""))),
        str(one.get("group", "")),
        *(_percent(one.get("achieved", {}).get(name)) for name in REACHED),
    )


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}".removesuffix("%")


def _scaled(number: float | None, unit: float) -> str:
    return "" if number is None else f"{number / unit:,.4g}"
