"""JAX to XLA, for cpu, cuda and tpu: plan, lower, compile, load.

Executables are serialized only from fresh compilations, with JAX's own cache off: one that came
from a cache hit serializes to a broken payload (jaxlib 0.10.2).
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowering.artifact import Artifact
from lowering.errors import LoweringError, OutOfMemory
from lowering.graph import Graph
from lowering.hlo.collectives import read
from lowering.lowered import Lowered
from lowering.machine import aot_devices, distributed, host
from lowering.machine.target import Target
from lowering.tracing.constrain import MEMORY_KINDS, placed, sharding
from lowering.tracing.cpu_hints import KEEP_BARRIERS
from lowering.tracing.current_target import tracing_for
from lowering.trees import Tree, flatten, unflatten
from lowering.xla.compiler_log import overhear
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import Plan, make_plan
from sharding_rules.rules import Rules

_COMPILED_WHERE_THEY_ARE = ("cpu", "rocm")
_THREADS_PER_DEVICE = 8  # collectives without an order between them, with some to spare

_ON_CARDS = {
    # Triton's products are tuned on the card, which is not here; cuBLAS chooses by itself.
    "xla_gpu_enable_triton_gemm": False,
    # Weights gathered twice within so many instructions are gathered once: in the backward pass a
    # layer's are, to compute the layer again and for its gradients. By default at no distance.
    "xla_gpu_experimental_collective_cse_distance_threshold": 1000,
    # From Hopper on the default; older cards would wait for most of their collectives.
    "xla_gpu_enable_latency_hiding_scheduler": True,
}

Device = Any  # jax.Device, which type checkers take for a variable


def described_devices(target: Target) -> list[Device]:
    """The devices to compile for: those of a CPU, else descriptions; no accelerator is needed.

    Raises:
        LoweringError: the target's compiler is not installed, or knows no such topology.
    """
    if target.platform in _COMPILED_WHERE_THEY_ARE:
        if target.platform == "cpu" and target.processes != distributed.count():
            distributed.stand_in(target)
        return devices(target)
    _settle("cpu", 1)
    return list(aot_devices.devices(target))


def devices(target: Target) -> list[Device]:
    """The target's devices in this process; a CPU is split into as many as asked, if not yet begun.

    Raises:
        LoweringError: the machine is not here, is another one, or has fewer devices.
    """
    _settle(target.platform, target.devices // (target.processes or 1))
    try:
        found = jax.devices(target.platform)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:
        raise LoweringError(_not_here(target, str(error).partition("\n")[0])) from None
    if len(found) < target.devices:
        raise LoweringError(
            f"{target} needs {target.devices} devices; this process began with {len(found)}"
        )
    hosts = len({device.process_index for device in found})
    if hosts > distributed.count():  # a TPU slice; each host would take itself for the first
        raise LoweringError(
            f"the devices of {target} are on {hosts} hosts, of which this process knows none but "
            "its own; give graphtrain on each of them --coordinator, --processes and --rank"
        )
    return found[: target.devices]


def _not_here(target: Target, said: str) -> str:
    where = {
        "cuda": "a machine with its driver and pip install 'jax[cuda13]'",
        "rocm": "a machine with ROCm 7 and pip install 'jax[rocm7-local]'; its plugin begins "
        "nowhere else, not even to compile",
        "tpu": "a TPU machine and pip install 'jax[tpu]'",
    }
    return (
        f"{target}: JAX finds no {target.platform} device here ({said}); it takes "
        f"{where[target.platform]}. graphtrain compile and plan need no device for other machines"
    )


def _settle(platform: str, cpu_devices: int) -> None:
    """Choose JAX's platforms, before anything asks it for a device.

    A virtual device waits in a thread for each collective that it has begun. Several wait for each
    other without end where XLA:CPU has no thread left to begin theirs, so it is told of more cores.
    """
    if platform != "cpu":
        cpu_devices = 1
    elif cpu_devices > 1:
        os.environ.setdefault("NPROC", str(_THREADS_PER_DEVICE * cpu_devices))
    try:
        jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError:
        pass  # the backend has begun; whoever needs its devices counts them
    jax.config.update("jax_enable_compilation_cache", False)


def make_mesh(shape: MeshShape, placed_on: list[Device]) -> Mesh:
    """The mesh with its devices; the partitioner propagates shardings along every axis."""
    if placed_on[0].platform == "tpu":  # neighbours on the mesh become neighbours on the torus
        sizes = tuple(shape.axes.values())
        grid = mesh_utils.create_device_mesh(sizes, placed_on, allow_split_physical_axes=True)
        return Mesh(grid, tuple(shape.axes))
    return Mesh(np.array(placed_on).reshape(tuple(shape.axes.values())), tuple(shape.axes))


def plan_graph(graph: Graph, rules: Rules, mesh: MeshShape) -> Plan:
    """Place every input and output of a graph."""
    return make_plan(graph.arrays(), rules, mesh)


def lower(
    graph: Graph,
    rules: Rules,
    mesh_shape: MeshShape,
    target: Target,
    placed_on: list[Device] | None = None,
    *,
    traced_for: Target | None = None,
) -> Lowered:
    """Trace a graph and attach its shardings.

    Args:
        placed_on: devices in place of those that describe the target.
        traced_for: what the program is for, if its devices only stand for others.

    Raises:
        ShardingError: an array cannot be placed.
        LoweringError: the target lacks a memory that the graph asks for.
    """
    plan = plan_graph(graph, rules, mesh_shape)
    placed_on = placed_on or described_devices(target)
    _check_memories(graph, placed_on[0], target)
    mesh = make_mesh(mesh_shape, placed_on)

    def described(tree: Tree, prefix: str) -> Tree:
        return unflatten(
            {
                path.removeprefix(prefix).lstrip("/"): jax.ShapeDtypeStruct(
                    spec.shape, spec.dtype, sharding=sharding(plan.layouts[path], mesh)
                )
                for path, spec in flatten(tree, prefix).items()
            }
        )

    outputs = jax.tree.map(lambda leaf: leaf.sharding, described(graph.outputs, ""))
    names = list(graph.inputs)
    jitted = jax.jit(
        graph.step,
        out_shardings=outputs,
        donate_argnums=tuple(names.index(name) for name in graph.donated),
    )
    with placed(mesh, rules) as placement, tracing_for(traced_for or target):
        handle = jitted.lower(*(described(tree, name) for name, tree in graph.inputs.items()))
    text, chosen = handle.as_text(), options(target, runs_once=graph.runs_once)
    facts = _facts(graph, plan) | {"annotations": [vars(each) for each in placement.annotations]}
    return Lowered(graph.name, text, plan, target, facts, chosen, handle)


def _check_memories(graph: Graph, device: Device, target: Target) -> None:
    """Refuse what JAX would drop in silence: cards described without a driver have no memories."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    wanted = {MEMORY_KINDS[spec.memory] for spec in graph.arrays().values()} - {"device"}
    if not wanted <= kinds:
        raise LoweringError(
            f"{target}: arrays that rest in the host's memory cannot be compiled for a card that "
            "is not here (jax lists no memories of it); set program.optimizer.offload = false"
        )


def options(target: Target, *, runs_once: bool = False) -> dict[str, Any]:
    """What we would have the compiler do otherwise than by default."""
    if target.platform == "cuda":
        return dict(_ON_CARDS)
    if target.platform != "cpu":
        return {}
    # LLVM takes most of the time of a CPU compilation: init of a 2-layer Llama 2.3 s, so 0.9 s.
    quickly = {"xla_backend_optimization_level": 1} if runs_once else {}
    return KEEP_BARRIERS | quickly


def _facts(graph: Graph, plan: Plan) -> dict[str, Any]:
    def arrays(tree: Tree) -> dict[str, Any]:
        return {
            path: {
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "split": [list(names) for names in plan.layouts[path].split],
                "memory": spec.memory,
            }
            for path, spec in flatten(tree).items()
        }

    return {
        "graph": graph.name,
        "mesh": dict(plan.mesh.axes),
        "arguments": list(graph.inputs),
        "inputs": arrays(dict(graph.inputs)),
        "outputs": arrays(graph.outputs),
        "donated": list(graph.donated),
    }


def compile(lowered: Lowered) -> Artifact:
    """Compile and serialize; the record says what the loader has to check."""
    began = time.perf_counter()
    with overhear() as replicated:
        compiled = _compile(lowered)
    seconds = time.perf_counter() - began
    payload, _, _ = serialize_executable.serialize(compiled)
    if lowered.target.platform == "cpu":
        from lowering.xla.cpu_collective_order import (
            keep_order,  # only here: protobuf takes a run 0.03 s to import
        )

        payload = keep_order(payload)
    memory = compiled.memory_analysis()
    record = lowered.facts | {
        "target": str(lowered.target),
        "compile_seconds": round(seconds, 3),
        "stablehlo_bytes": len(lowered.text),
        "fingerprint": fingerprint(described_devices(lowered.target)),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "host": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
            "peak": _peak(memory, lowered.target),
        },
        "replicated": replicated,
        **read(compiled.as_text(), lowered.plan.mesh).to_record(),
    }
    return Artifact(payload, record)


def _compile(lowered: Lowered) -> Any:
    try:
        return lowered.handle.compile(compiler_options=lowered.options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(lowered.name, lowered.target, str(error)) from None


def _peak(memory: Any, target: Target) -> int:
    """Most bytes a device holds at once. XLA:CPU reports its arguments alone, so there it is all
    that is held at some time: an upper bound."""
    if target.platform == "cpu":
        new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new_outputs
    return memory.peak_memory_in_bytes


class Executable:
    """A loaded program: call it with the trees its graph names, in order."""

    def __init__(self, compiled: Any, record: Mapping[str, Any], mesh: Mesh) -> None:
        self._compiled = compiled
        self.record = record
        self.mesh = mesh

    def __call__(self, *inputs: Tree) -> Tree:
        try:
            return self._compiled(*inputs)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemory(self.record["graph"], self.record["target"], str(error)) from None

    def inputs(self, name: str) -> Tree:
        """Shapes, dtypes and shardings of one argument, as jax.ShapeDtypeStruct."""
        return unflatten(
            {
                path.removeprefix(name).lstrip("/"): self._struct(fact)
                for path, fact in self.record["inputs"].items()
                if path == name or path.startswith(f"{name}/")
            }
        )

    def _struct(self, fact: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
        split = PartitionSpec(*(tuple(names) or None for names in fact["split"]))
        return jax.ShapeDtypeStruct(
            fact["shape"],
            fact["dtype"],
            sharding=NamedSharding(self.mesh, split, memory_kind=MEMORY_KINDS[fact["memory"]]),
        )


def load(artifact: Artifact, target: Target) -> Executable:
    """Load an executable; the payload must already have been checked against its digest.

    Raises:
        LoweringError: it was compiled for a processor that differs from this one. XLA itself would
            load it and die of an illegal instruction later.
    """
    record = artifact.record
    placed_on = devices(target)
    check_fingerprint(record, placed_on)
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
    """Refuse a program that was compiled for devices other than these."""
    here = fingerprint(placed_on)
    if record["fingerprint"] != here:
        raise LoweringError(
            f"the compiled {record['graph']} step was made for another processor "
            f"({record['fingerprint']}, here {here}); compile for the machine that runs it"
        )


def fingerprint(placed_on: list[Device]) -> str:
    """XLA's own digest of the devices and a CPU's instruction set; of an accelerator what its
    description and the device itself both tell, and code depends on."""
    kind = placed_on[0]
    if kind.platform == "gpu":
        return f"compute capability {kind.compute_capability}"
    if kind.platform == "tpu":
        return f"{kind.device_kind}, {kind.num_cores} cores, {len(placed_on)} devices"
    if any(device.process_index for device in placed_on):  # XLA's digest differs by process
        return f"{len(placed_on)} devices, {host.processor()['features']}"
    # The digest JAX's own cache uses; it has no public name (jax 0.11).
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return f"{xla_client.get_topology_for_devices(placed_on).fingerprint():016x}"


def forbid_tracing() -> AbstractContextManager[Any]:
    """While inside, whatever JAX would have to trace is an error on this thread.

    One stray eager operation would otherwise compile in the middle of a run, on every host.
    """
    from jax._src import config  # no public name for this guard (jax 0.11)

    return config.no_tracing(True)


def put(tree: Tree, described: Tree) -> Tree:
    """Host arrays onto the devices, where an executable's inputs() say; of several processes each
    puts what its own devices hold."""
    if distributed.count() == 1:
        return jax.device_put(tree, jax.tree.map(lambda array: array.sharding, described))

    def placed(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        host_array = np.asarray(array, like.dtype)
        return jax.make_array_from_callback(
            host_array.shape, like.sharding, lambda index: host_array[index]
        )

    return jax.tree.map(placed, tree, described)


def fill(
    described: Tree, read: Callable[[str, tuple[int, ...], tuple[slice, ...]], np.ndarray]
) -> Tree:
    """Arrays on the devices, as described; each device's part is read by itself.

    Args:
        described: Shapes, dtypes and shardings.
        read: Of a path, the shape of its array and an index into that: the part.
    """

    def make(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(
            like.shape,
            like.sharding,
            lambda index: read(path, like.shape, index or ()).astype(like.dtype, copy=False),
        )

    return unflatten({path: make(path, like) for path, like in flatten(described).items()})


def storable(tree: Tree) -> Tree:
    """What a checkpoint can write: arrays of JAX, as they are."""
    return tree


def memory_in_use() -> int:
    """Bytes in use on the fullest device; a CPU's devices share what the process holds."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    used = [stat["bytes_in_use"] for stat in stats if stat]
    return max(used) if used else host.resident_bytes()


def peak_memory() -> int:
    """Most bytes that were in use at once on a device; on a CPU, by the whole process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat]
    return max(peaks) if peaks else host.peak_resident_bytes()
