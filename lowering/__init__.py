"""Lower, compile and load a Graph for a target: targets, toolchains and backends.

A backend is a module, or any object, with the functions of `Backend`. `backend(target)` finds it by
the target's platform among those of this package and those that installed packages offer as entry
points of the group `graphtrain.backends`; see docs/contributing/add-a-backend.md.

May import `sharding_rules`, and nothing from `graphtrain`. Contains no code specific to language
models. Importing this package imports neither JAX nor a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import jax
    import numpy as np

    from lowering.artifact import Artifact
    from lowering.graph import Graph
    from lowering.lowered import Lowered
    from lowering.machine.target import Target
    from lowering.trees import Tree
    from sharding_rules.mesh import MeshShape
    from sharding_rules.plan import Plan
    from sharding_rules.rules import Rules

Device = Any  # jax.Device; type checkers reject it as a type


class Executable(Protocol):
    """A loaded program."""

    record: Mapping[str, Any]  # of its artifact

    def __call__(self, *inputs: Tree) -> Tree:
        """Run the program on the inputs of its graph, in order; donated inputs are consumed.

        Raises:
            OutOfMemory: the program does not fit in the memory of a device.
        """
        ...

    def inputs(self, name: str) -> Tree:
        """Return one input of the graph as a tree of jax.ShapeDtypeStruct with shardings."""
        ...


class Backend(Protocol):
    """The functions of a backend. Devices, meshes and arrays are JAX's."""

    def compile_devices(self, target: Target) -> list[Device]:
        """Return devices to trace and compile for, as many as the target has.

        They may be descriptions of devices that are not attached. It is called before any other use
        of JAX in a process, so it may configure JAX.

        Raises:
            LoweringError: the compiler does not support the topology.
            MissingExtra: the compiler is not installed.
        """
        ...

    def devices(self, target: Target) -> list[Device]:
        """Return JAX devices of this process that hold a run's arrays, as many as the target has.

        Raises:
            LoweringError: this machine or run has no such devices.
        """
        ...

    def make_mesh(self, shape: MeshShape, placed_on: list[Device]) -> jax.sharding.Mesh:
        """Arrange devices as a mesh; neighbours in the mesh should have fast links."""
        ...

    def plan_graph(self, graph: Graph, rules: Rules, mesh: MeshShape) -> Plan:
        """Return the layout of every input and output of a graph, without a device.

        Raises:
            ShardingError: a rule cannot split an array.
        """
        ...

    def lower(self, graph: Graph, rules: Rules, mesh_shape: MeshShape, target: Target) -> Lowered:
        """Trace a graph with its shardings into the compiler's input.

        `text`, `options` and `facts` of the result identify the program: equal ones share a
        compilation, so everything that changes the executable must be in one of them.

        Raises:
            ShardingError: a rule cannot split an array.
            LoweringError: the target does not support the graph.
        """
        ...

    def compile(self, lowered: Lowered) -> Artifact:
        """Compile and serialize a program.

        The record of the artifact contains `lowered.facts`, the target's name ("target"), seconds
        ("compile_seconds"), bytes by kind ("memory", with their "peak") and whatever load() checks.

        Raises:
            OutOfMemory: the program does not fit in the memory of a device.
            CompilerMissing: the compiler is not installed; carries its input files.
            LoweringError: the compiler rejected the program.
        """
        ...

    def load(self, artifact: Artifact, target: Target) -> Executable:
        """Load a compiled program; nothing is traced or compiled. The payload has been verified.

        Raises:
            LoweringError: it was compiled for another machine, or this one cannot run it.
        """
        ...

    def to_devices(self, tree: Tree, described: Tree) -> Tree:
        """Copy host arrays to the devices, with the shapes and shardings of `described`.

        With several processes, each copies the shards of its own devices.
        """
        ...

    def from_shards(
        self, described: Tree, read: Callable[[str, tuple[int, ...], tuple[slice, ...]], np.ndarray]
    ) -> Tree:
        """Create arrays on the devices; `read` returns one shard by path, whole shape and index."""
        ...

    def checkpoint_arrays(self, tree: Tree) -> Tree:
        """Return a tree of arrays as jax.Array, which a checkpoint can write."""
        ...

    def forbid_tracing(self) -> AbstractContextManager[Any]:
        """Return a context in which tracing, and so compiling, raises an error on this thread."""
        ...

    def memory_in_use(self) -> int:
        """Return the bytes in use on the fullest device of this process."""
        ...

    def peak_memory(self) -> int:
        """Return the peak of the bytes in use on any device of this process."""
        ...


class GlobalProgramBackend(Backend, Protocol):
    """A backend that also compiles programs which another program traced, as PyTorch/XLA does."""

    def from_global_program(self, program: Lowered, target: Target) -> Lowered:
        """Return the compiler's input for a program lowered for as many CPU devices.

        Raises:
            LoweringError: the target does not support the program.
        """
        ...


def backend(target: Target) -> Backend:
    """Return the backend that lowers, compiles and loads for a target. Import it on first use.

    Raises:
        LoweringError: no installed package provides the platform, or its backend is incomplete.
    """
    from lowering.machine import backends

    return cast(Backend, backends.find_backend(target.platform, functions(Backend)))


def functions(protocol: type) -> list[str]:
    """Return the names of the functions that a protocol of this module requires."""
    names = [
        name for base in protocol.__mro__ if base.__module__ == __name__ for name in vars(base)
    ]
    return sorted(name for name in names if not name.startswith("_"))
