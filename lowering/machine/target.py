"""Target: the machine to compile for, attached or not."""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lowering.errors import LoweringError
from lowering.machine import gpu_memory, host
from lowering.machine.machine_tables import program_changes, specification, suggestion
from lowering.machine.topology_check import (
    problem_of_hosts,
    problem_of_number,
    problem_of_slice,
)

TPU_LANES = 128  # elements in a row of a TPU's memory layout; arrays are padded to full rows
_SIZE = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)  # of one dimension of a topology
_SLICES = re.compile(r"([1-9][0-9]{0,3})x(?=[^0-9])", re.ASCII)  # before the name of a machine


@dataclass(frozen=True)
class Achieved:
    """Fractions of a machine's peak that training steps reach in practice."""

    products: float  # of the peak FLOP/s, by matrix products in 16 and 32 bits
    attention: float  # of the peak FLOP/s, by kernels of causal attention that skip masked blocks
    tensor_overlap: float  # of the communication of tensor parallelism, hidden behind products
    machine: str = ""  # whose steps were published; empty: nobody's, the user gives them
    products_8bit: float | None = None  # of the peak in fp8 or int8; None: as products

    @property
    def narrow_products(self) -> float:
        """Fraction of the peak FLOP/s of 8 bits by products in fp8 and int8, with their casts."""
        return self.products if self.products_8bit is None else self.products_8bit


AT_PEAK = Achieved(products=1.0, attention=1.0, tensor_overlap=0.0)
# Numbers of a machine that its published steps were predicted with.
_SPEEDS = {"achieved", "flops", "bandwidth", "link", "network", "group", "per_host"}
# Machines whose fractions stand for those of the platform's other machines.
_LIKE = {"cuda": "h100", "rocm": "h100", "tpu": "v5p", "neuron": "trn1", "ascend": "ascend910b"}


@dataclass(frozen=True)
class Target:
    """A machine and its devices: cpu:8, h100:64, v5p:4x4x4, or hosts x devices of each: h100:4x2.

    A host of a CPU target is a process: cpu:2x4 is 2 processes of 4 devices. Several slices of a
    TPU are joined by the data-center network (DCN): 2xv5p:4x4x4.
    """

    machine: str  # cpu, or a machine of topologies.toml, the user's file or an installed backend
    topology: tuple[int, ...]  # chips along each physical dimension, or hosts x devices of each
    slices: int = 1  # of a TPU, each with this topology

    @classmethod
    def parse(cls, name: str) -> "Target":
        """Parse "machine:devices", for example "cpu:8" or "v5p:4x4x4".

        Raises:
            LoweringError: unknown machine or impossible topology; the message says what is valid.
        """
        head, colon, sizes = name.partition(":")
        machine = machine_of(head)[:100]  # no machine has a longer name
        if machine != "cpu" and specification(machine) is None:
            raise LoweringError(f"unknown target machine {machine!r}; {suggestion(machine)}")
        parts = (sizes if colon else "1").split("x")
        if not all(_SIZE.fullmatch(size) for size in parts) or len(parts) > 3:
            raise LoweringError(
                f"target {name[:100]!r}: devices must be positive integers, as in cpu:8 "
                "or v5p:4x4x4, each below a million"
            )
        counted = _SLICES.match(head)
        slices = int(counted[1]) if counted else 1
        target = cls(machine, tuple(int(size) for size in parts), slices)
        if counted and target.platform != "tpu":
            raise LoweringError(
                f"target {name!r}: only TPUs have slices, as in 2xv5p:4x4x4; write the devices of "
                f"all hosts after the name, as in {machine}:{target.devices}"
            )
        if problem := target._problem():
            raise LoweringError(f"target {name!r}: {problem}")
        return target

    def _problem(self) -> str:
        """Return why the topology is impossible and what to write; empty if it is possible."""
        sizes, machine, table = self.topology, self.machine, self.specification
        per_host = self._usual_per_host
        if self.has_process_topology and len(sizes) > 2:
            return f"write the number of processes and the devices of each, as in {machine}:2x4"
        if self.platform == "tpu":
            return problem_of_slice(machine, sizes, table)
        if len(sizes) == 1:
            return problem_of_number(machine, self.devices, table, per_host, is_gpu=self.is_gpu)
        if not self.has_process_topology:
            return f"{machine} has no topology; write {machine}:{self.devices}"
        if self.is_gpu and per_host:
            return problem_of_hosts(machine, sizes, table, per_host)
        return ""

    @property
    def platform(self) -> str:
        """Compiler platform, which selects the backend; built in: see backends.BUILT_IN."""
        return self.specification.get("platform", "cpu")

    @cached_property  # a search reads it a million times, and each looks at the user's file
    def specification(self) -> dict[str, Any]:
        """The machine's table; empty for cpu, whose data is read at run time.

        It is in topologies.toml, in the user's file, or in the installed package that offers the
        machine.
        """
        table = {} if self.machine == "cpu" else specification(self.machine)
        if table is None:  # not made by parse()
            raise LoweringError(f"unknown target machine {self.machine!r}")
        return table

    @property
    def numbers_source(self) -> str:
        """Source of the numbers of the machine: this machine, the user's file, a datasheet."""
        if self.machine == "cpu":
            return "this machine"
        return self.specification.get("file", "datasheet")

    @property
    def is_gpu(self) -> bool:
        """True if its devices are GPUs."""
        return self.platform in ("cuda", "rocm")

    @property
    def runs_on_cpu(self) -> bool:
        """True if its devices run on this machine's CPU and share its memory."""
        return self.machine == "cpu" or "simulates" in self.specification

    @property
    def random_bits(self) -> str | None:
        """JAX name of the only PRNG that the machine fully supports; None if it supports all.

        Neuron devices support only XLA's own generator ("rbg"). A simulated Neuron device uses the
        CPU's generator, so that its losses can be compared with a CPU's.
        """
        return "rbg" if self.platform == "neuron" and not self.runs_on_cpu else None

    @property
    def has_process_topology(self) -> bool:
        """True if a topology can be "processes x devices of each process"; a process is a host."""
        by_process = self.specification.get("by_process", False)
        return self.machine == "cpu" or by_process or self.is_gpu

    @property
    def devices(self) -> int:
        """Number of all devices."""
        return self.slices * self.devices_per_slice

    @property
    def devices_per_slice(self) -> int:
        """Number of devices that are in one slice; all of a machine without slices."""
        return math.prod(self.topology) * self.specification.get("devices_per_chip", 1)

    @property
    def processes(self) -> int | None:
        """Number of processes, one for each host; None if the launcher determines it."""
        if self.has_process_topology and len(self.topology) > 1:
            return self.topology[0]
        if self.machine == "cpu":
            return 1
        per_host = self._usual_per_host
        return -(-self.devices // per_host) if per_host else None

    def with_hosts(self, hosts: int) -> "Target":
        """Return the same machine with another number of hosts of as many devices each.

        Raises:
            LoweringError: the target does not determine its number of hosts.
        """
        per_host = self.devices_per_host
        if self.processes is None or per_host is None:
            raise LoweringError(
                f"{self} does not determine its number of hosts; compile for each topology by "
                "itself, with --target"
            )
        is_explicit = self.has_process_topology and len(self.topology) > 1
        sizes = f"{hosts}x{per_host}" if is_explicit and hosts > 1 else f"{hosts * per_host}"
        return Target.parse(f"{self.machine}:{sizes}")

    @property
    def devices_per_host(self) -> int | None:
        """Number of devices of a complete host; None if the launcher determines it."""
        if self.has_process_topology and len(self.topology) > 1:
            return self.topology[1]
        return self._usual_per_host or None

    @property
    def ranks_per_process(self) -> int:
        """Number of ranks, each in a process of its own, that one process of a run starts."""
        starts_ranks = "rank_processes" in self.specification
        return (self.devices_per_host or 1) if starts_ranks and self.processes != 1 else 1

    @property
    def _usual_per_host(self) -> int:
        """Number of devices of a host, where the name of the target does not say it; 0: unknown."""
        return int(self.specification.get("per_host", self.specification.get("group", 0)))

    @property
    def linked_devices(self) -> int | None:
        """Number of devices that the machine's link connects; None if it connects all.

        It is a host, or a rack of several hosts.
        """
        group = self.specification.get("group")
        if group is None or group > self._usual_per_host:
            return group
        return self.devices_per_host

    @property
    def memory_bytes(self) -> int:
        """Memory of one device in bytes; CPU devices share the machine's memory equally."""
        if self.machine == "cpu":
            return host.memory_bytes() // self.devices
        return int(self.specification["memory"])

    @property
    def usable_memory_bytes(self) -> int:
        """Memory of one device that arrays can use; of a GPU, the pool of JAX's allocator."""
        if not self.is_gpu:
            return self.memory_bytes
        return int(self.memory_bytes * gpu_memory.pool_fraction())

    @property
    def achieved(self) -> Achieved | None:
        """Fractions of the peak that steps reach, fitted to published ones; None if unknown.

        A machine without published steps has those of one that is like it, or of its platform.
        """
        if self.runs_on_cpu:
            return None
        alike = self.specification.get("like", _LIKE.get(self.platform))
        machine = self.machine if "achieved" in self.specification else alike
        of_machine = (machine and specification(machine)) or {}
        if not machine or not (table := of_machine.get("achieved")):
            return None
        changed = _SPEEDS.intersection(of_machine.get("file_numbers", ()))
        published = f"the built-in {machine}" if changed else machine
        return Achieved(**table, machine="" if "achieved" in changed else published)

    def peak_flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of all devices together; 0.0 if it is unknown for the dtype.

        Machines that multiply in float16 do so as fast as in bfloat16.
        """
        if self.machine == "cpu":
            return host.peak_flops(dtype)
        listed = "bfloat16" if dtype == "float16" else dtype
        return self.devices * self.specification["flops"].get(listed, 0.0)

    def key_parts(self) -> dict[str, Any]:
        """Return the properties of the machine that go into the cache key of a program."""
        about: dict[str, Any] = {"machine": self.machine, "topology": self.topology_text}
        if self.slices > 1:
            about["slices"] = self.slices
        if changes := program_changes(self.machine):
            about["targets_file"] = changes
        return about | ({"processor": host.processor()} if self.runs_on_cpu else {})

    @property
    def topology_text(self) -> str:
        """The sizes as they are written after the name of the machine."""
        return "x".join(map(str, self.topology))

    def __str__(self) -> str:
        count = f"{self.slices}x" if self.slices > 1 else ""
        return f"{count}{self.machine}:{self.topology_text}"


def machine_of(target: str) -> str:
    """Return the name of the machine in the name of a target, which need not exist."""
    name = target.partition(":")[0]
    counted = _SLICES.match(name)
    return name[counted.end() :] if counted else name
