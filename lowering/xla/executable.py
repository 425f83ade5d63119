"""Loaded programs, and the inputs that their records describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowering.artifact import Artifact
from lowering.errors import LoweringError, OutOfMemory
from lowering.machine.target import Target
from lowering.tracing.constrain import MEMORY_KINDS
from lowering.trees import Tree, unflatten
from lowering.xla import private
from lowering.xla.devices import Device, devices, fingerprint, make_mesh
from sharding_rules.mesh import MeshShape


class Executable:
    """A loaded program: call it with the inputs of its graph, in order."""

    def __init__(self, compiled: Any, record: Mapping[str, Any], mesh: Mesh) -> None:
        self._compiled = compiled
        self.record = record
        self.mesh = mesh

    def __call__(self, *inputs: Tree) -> Tree:
        try:
            return self._compiled(*inputs)
        except jax.errors.JaxRuntimeError as error:
            if not private.is_out_of_memory(error):
                raise
            raise OutOfMemory(self.record["graph"], self.record["target"], str(error)) from None

    def compiled_text(self) -> str:
        """Return the text of the optimized program, whose operations a profiler names."""
        return self._compiled.as_text()

    def inputs(self, name: str) -> Tree:
        """Return shapes, dtypes and shardings of one input, as a tree of jax.ShapeDtypeStruct."""
        return described_inputs(self.record, self.mesh, name)


def described_inputs(record: Mapping[str, Any], mesh: Mesh, name: str) -> Tree:
    """Return what `Executable.inputs` does, for a program that need not be loaded."""

    def described(fact: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
        split = PartitionSpec(*(tuple(names) or None for names in fact["split"]))
        sharding = NamedSharding(mesh, split, memory_kind=MEMORY_KINDS[fact["memory"]])
        return jax.ShapeDtypeStruct(fact["shape"], fact["dtype"], sharding=sharding)

    return unflatten(
        {
            path.removeprefix(name).lstrip("/"): described(fact)
            for path, fact in record["inputs"].items()
            if path == name or path.startswith(f"{name}/")
        }
    )


def load(artifact: Artifact, target: Target) -> Executable:
    """Load an executable; the payload must already have been checked against its digest.

    Raises:
        LoweringError: it was compiled for a different processor. XLA itself would load it and crash
            later with an illegal instruction.
    """
    record = artifact.record
    placed_on = devices(target)
    check_fingerprint(record, placed_on)
    if target.platform == "cpu" and b"lapack_" in artifact.payload:
        private.initialize_lapack()
    arguments = unflatten(dict.fromkeys(record["inputs"], 0))
    inputs = tuple(arguments[name] for name in record["arguments"]), {}
    outputs = unflatten(dict.fromkeys(record["outputs"], 0))
    compiled = serialize_executable.deserialize_and_load(
        artifact.payload,
        jax.tree.structure(inputs),
        jax.tree.structure(outputs),
        backend=placed_on[0].client,
        execution_devices=placed_on,
    )
    return Executable(compiled, record, make_mesh(MeshShape(record["mesh"]), placed_on))


def check_fingerprint(record: Mapping[str, Any], placed_on: list[Device]) -> None:
    """Raise LoweringError if a program was compiled for other devices than `placed_on`."""
    actual = fingerprint(placed_on)
    if record["fingerprint"] != actual:
        raise LoweringError(
            f"the {record['graph']} step was compiled for another processor "
            f"({record['fingerprint']}; this machine: {actual}); compile it for this machine"
        )
