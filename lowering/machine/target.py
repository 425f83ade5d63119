"""Target: the machine compiled for, attached or not."""

import difflib
import functools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowering.errors import LoweringError
from lowering.machine import host

CHIPS_OF_A_HOST = 4  # on a TPU
_TOPOLOGIES = Path(__file__).parent / "topologies.toml"


@dataclass(frozen=True)
class Target:
    """A machine by name, as in cpu:8, cpu:2x4 (two processes), h100:64 or v5p:4x4x4."""

    machine: str  # cpu, or a name of topologies.toml
    topology: tuple[int, ...]  # chips along each physical dimension

    @classmethod
    def parse(cls, name: str) -> "Target":
        """Read "machine:devices".

        Raises:
            LoweringError: no such machine, or no such topology; with what there is.
        """
        machine, colon, sizes = name.partition(":")
        known = machines()
        if machine not in known:
            near = difflib.get_close_matches(machine, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise LoweringError(f"no target machine {machine!r}; {hint}")
        parts = (sizes if colon else "1").split("x")
        if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise LoweringError(f"target {name!r}: write devices as in cpu:8 or v5p:4x4x4")
        target = cls(machine, tuple(int(part) for part in parts))
        if problem := target._problem():
            raise LoweringError(f"target {name!r}: {problem}")
        return target

    def _problem(self) -> str:
        """Why there is no such machine, and what to write; empty if there is."""
        sizes, machine, group = self.topology, self.machine, int(self.about.get("group", 0))
        if self._by_process and len(sizes) > 2:
            return f"write processes and devices of each, {machine}:2x4"
        if self.platform == "tpu":
            return self._problem_of_torus()
        if len(sizes) > 1:
            by_number = f"{machine} come by number; write {machine}:{self.devices}"
            return "" if self._by_process else by_number
        if group and self.devices > group and self.devices % group:
            return f"{machine} come {group} to a host; ask for a multiple of {group}"
        return ""

    def _problem_of_torus(self) -> str:
        sizes, machine = self.topology, self.machine
        dimensions, largest = self.about["dimensions"], self.about["slice"]
        example = f"{machine}:{'x'.join('221'[:dimensions])}"
        if len(sizes) != dimensions:
            return f"{machine} is a torus of {dimensions} dimensions; write chips as in {example}"
        if math.prod(sizes) > largest:
            return f"a slice of {machine} has {largest} chips at most"
        if math.prod(sizes) >= CHIPS_OF_A_HOST and (sizes[0] % 2 or sizes[1] % 2):
            return f"a host has 2x2 chips; the first two sizes must be even, as in {example}"
        return ""

    @property
    def platform(self) -> str:
        """What the compiler calls the machine: cpu, cuda, rocm, tpu, neuron or ascend."""
        return self.about.get("platform", "cpu")

    @property
    def about(self) -> dict[str, Any]:
        """The machine's table in topologies.toml; empty for a CPU, which is asked instead."""
        return {} if self.machine == "cpu" else _topologies()[self.machine]

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are cards."""
        return self.platform in ("cuda", "rocm")

    @property
    def on_host(self) -> bool:
        """Whether its devices are made of this machine's processor and share its memory."""
        return self.machine == "cpu" or "simulates" in self.about

    @property
    def random_bits(self) -> str | None:
        """JAX's name of the only generator that the machine has in full; None: it has all.

        Neuron devices have XLA's own. A simulation of one draws as a CPU does, so that its losses
        can be held against a CPU's.
        """
        return "rbg" if self.platform == "neuron" and not self.on_host else None

    @property
    def _by_process(self) -> bool:
        """Whether a topology may be processes by devices of each."""
        return self.machine == "cpu" or self.about.get("by_process", False)

    @property
    def devices(self) -> int:
        return math.prod(self.topology) * self.about.get("devices_per_chip", 1)

    @property
    def processes(self) -> int | None:
        """How many drive it, one for each host; None where the launcher knows."""
        if self._by_process and len(self.topology) > 1:
            return self.topology[0]
        if self.machine == "cpu":
            return 1
        group = self.about.get("group")
        return None if group is None else -(-self.devices // int(group))

    @property
    def memory_bytes(self) -> int:
        """Memory of one device; devices of a CPU share the machine's."""
        if self.machine == "cpu":
            return host.memory_bytes() // self.devices
        return int(self.about["memory"])

    def peak_flops(self, dtype: str) -> float:
        """Of all devices together, per second; 0.0 where no number is known."""
        if self.machine == "cpu":
            return host.peak_flops(dtype)
        return self.devices * self.about["flops"].get(dtype, 0.0)

    def ingredients(self) -> dict[str, Any]:
        """What of the machine a compiled program depends on, for its key."""
        about = {"machine": self.machine, "topology": "x".join(map(str, self.topology))}
        return about | ({"processor": host.processor()} if self.on_host else {})

    def __str__(self) -> str:
        return f"{self.machine}:{'x'.join(map(str, self.topology))}"


def machines() -> list[str]:
    """Names of the machines that a target can have."""
    return ["cpu", *_topologies()]


@functools.cache
def _topologies() -> dict[str, Any]:
    return tomllib.loads(_TOPOLOGIES.read_text())
