"""Backend for XLA (cpu, cuda, rocm and tpu): plan, lower, compile and load with JAX.

Only fresh compilations are serialized, with JAX's own compilation cache disabled: an executable
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
from lowering.hlo.work import read_work
from lowering.lowered import Lowered
from lowering.machine import aot_devices, gpu_memory, host
from lowering.machine.target import Target
from lowering.tracing.constrain import MEMORY_KINDS, sharding, use_placement
from lowering.tracing.cpu_hints import KEEP_OPTIMIZATION_BARRIERS
from lowering.tracing.current_target import trace_for_target
from lowering.trees import Tree, flatten, unflatten
from lowering.xla import distributed, private
from lowering.xla.compiler_log import capture_compiler_log
from lowering.xla.fake_peers import fake_peer_processes
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import Plan, make_plan
from sharding_rules.rules import Rules

_REQUIRES_DEVICES = ("cpu", "rocm")
_THREADS_PER_DEVICE = 8  # more than the number of concurrent collectives without dependencies

_GPU_OPTIONS = {
    # Triton GEMMs are autotuned on the GPU, which is not attached; cuBLAS selects kernels itself.
    "xla_gpu_enable_triton_gemm": False,
    # Merge equal all-gathers up to this many instructions apart (default: 0). In the backward pass
    # a layer's weights are otherwise gathered twice: for rematerialization and for its gradients.
    "xla_gpu_experimental_collective_cse_distance_threshold": 1000,
    # Default since Hopper. Older GPUs would otherwise overlap few of their collectives.
    "xla_gpu_enable_latency_hiding_scheduler": True,
}

# XLA computes products of one input as one, of weights that it copies side by side first: decode
# would copy those of all layers in each call. 0 MB: of no size.
_GPU_FEW_ROWS = {"xla_gpu_dot_merger_threshold_mb": 0}

_FIXED_COUNT = (
    ", whose number of CPU devices was fixed when JAX was first used; use another process, or in a "
    "notebook restart the kernel, and run the target with the most devices first"
)

Device = Any  # jax.Device; type checkers reject it as a type


def compile_devices(target: Target) -> list[Device]:
    """Return the devices to compile for: real ones on cpu and rocm, else ahead-of-time devices.

    Compiling for cuda and tpu needs no accelerator.

    Raises:
        LoweringError: the target's compiler is not installed, or does not support the topology.
    """
    if target.platform in _REQUIRES_DEVICES:
        if target.platform == "cpu" and target.processes != distributed.count():
            fake_peer_processes(target)
        return devices(target)
    _configure_platform("cpu", 1)
    return list(aot_devices.devices(target))


def devices(target: Target) -> list[Device]:
    """Return the target's devices in this process.

    A CPU is split into the required number of devices, unless JAX's backend is initialized already.

    Raises:
        LoweringError: JAX finds no device of the platform, or fewer than the target has, or devices
            of hosts whose processes have not joined this one.
    """
    _configure_platform(target.platform, target.devices // (target.processes or 1))
    try:
        available = jax.devices(target.platform)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:
        raise LoweringError(
            _missing_device_message(target, str(error).partition("\n")[0])
        ) from None
    if len(available) < target.devices:
        raise LoweringError(
            f"{target} needs {target.devices} devices; JAX has {len(available)} in this process"
            f"{_FIXED_COUNT if target.platform == 'cpu' else ''}"
        )
    hosts = len({device.process_index for device in available})
    if hosts > distributed.count():  # a TPU slice; each host would act as rank 0
        raise LoweringError(
            f"the devices of {target} are on {hosts} hosts, but this process was started alone; "
            "start one process on each host, with the coordinator's address, the number of "
            "processes and its rank"
        )
    return available[: target.devices]


def _missing_device_message(target: Target, reason: str) -> str:
    requirements = {
        "cuda": "a machine with its driver and pip install 'jax[cuda13]'",
        "rocm": "a machine with ROCm 7 and pip install 'jax[rocm7-local]', which is needed even to "
        "compile",
        "tpu": "a TPU machine and pip install 'jax[tpu]'",
    }
    return (
        f"{target}: JAX finds no {target.platform} device on this machine ({reason}); it requires "
        f"{requirements[target.platform]}. Except for rocm, planning and compiling require no "
        "device"
    )


def _configure_platform(platform: str, cpu_devices: int) -> None:
    """Configure JAX's platforms and number of CPU devices, before its backend is initialized.

    A virtual CPU device blocks one thread for each collective in progress. If XLA:CPU has no thread
    left to start the collectives of the other devices, they deadlock; NPROC enlarges its thread
    pool.
    """
    gpu_memory.reserve_pool()  # JAX reads it when it first looks for devices of any platform
    if platform != "cpu":
        cpu_devices = 1
    elif cpu_devices > 1:
        os.environ.setdefault("NPROC", str(_THREADS_PER_DEVICE * cpu_devices))
    try:
        jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError:
        pass  # the backend is initialized; devices() checks the number of devices
    jax.config.update("jax_enable_compilation_cache", False)


def make_mesh(shape: MeshShape, placed_on: list[Device]) -> Mesh:
    """Return the JAX mesh of these devices; on TPU in an order that fits the torus."""
    if placed_on[0].platform == "tpu":  # neighbours in the mesh become neighbours in the torus
        return Mesh(_grid_of_slices(shape, placed_on), tuple(shape.axes))
    return Mesh(np.array(placed_on).reshape(tuple(shape.axes.values())), tuple(shape.axes))


def _grid_of_slices(shape: MeshShape, placed_on: list[Device]) -> np.ndarray:
    """Return TPU devices in the order of a mesh, whose slowest axes run across slices."""
    sizes, slices = tuple(shape.axes.values()), _slices(placed_on)
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, placed_on, allow_split_physical_axes=True)
    across = tuple(shape.across(slices).values())
    inside = tuple(size // part for size, part in zip(sizes, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        inside, across, placed_on, allow_split_physical_axes=True
    )


def _slices(placed_on: list[Device]) -> int:
    """Return the number of TPU slices that devices are in."""
    return len({getattr(device, "slice_index", 0) for device in placed_on})


def plan_graph(graph: Graph, rules: Rules, mesh: MeshShape) -> Plan:
    """Return the plan: the layout of every input and output of a graph."""
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
    """Trace a graph with its shardings into StableHLO.

    Args:
        graph: the step to trace.
        rules: sharding rules for its arrays.
        mesh_shape: mesh axes and sizes; their product is the target's number of devices.
        target: the machine to compile for.
        placed_on: devices to use instead of compile_devices(target).
        traced_for: the target that traced code sees, if it is not `target`.

    Raises:
        ShardingError: a rule cannot split an array.
        LoweringError: the graph uses host memory, which the target's devices do not support.
    """
    plan = plan_graph(graph, rules, mesh_shape)
    placed_on = placed_on or compile_devices(target)
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
    with use_placement(mesh, rules) as placement, trace_for_target(traced_for or target):
        handle = jitted.lower(*(described(tree, name) for name, tree in graph.inputs.items()))
    text = handle.as_text()
    chosen = compiler_options(target, runs_once=graph.runs_once, has_few_rows=graph.has_few_rows)
    facts = _facts(graph, plan) | {"annotations": [vars(each) for each in placement.annotations]}
    return Lowered(graph.name, text, plan, target, facts, chosen, handle)


def _check_memories(graph: Graph, device: Device, target: Target) -> None:
    """Raise LoweringError if the devices lack a memory kind that the graph uses.

    JAX would ignore the memory kind silently. Ahead-of-time GPU devices have no host memory.
    """
    kinds = {memory.kind for memory in device.addressable_memories()}
    required_kinds = {MEMORY_KINDS[spec.memory] for spec in graph.arrays().values()} - {"device"}
    if not required_kinds <= kinds:
        raise LoweringError(
            f"{target}: arrays in host memory cannot be compiled for a GPU that is not attached to "
            "this machine (JAX lists no host memory for it); set "
            "program.optimizer.offload_to_host = false"
        )


def compiler_options(
    target: Target, *, runs_once: bool = False, has_few_rows: bool = False
) -> dict[str, Any]:
    """Return the compiler options that differ from XLA's defaults.

    Args:
        target: the machine to compile for.
        runs_once: prefer a short compilation to fast code.
        has_few_rows: do not copy weights for the sake of their products.
    """
    if target.platform == "cuda":
        return _GPU_OPTIONS | (_GPU_FEW_ROWS if has_few_rows else {})
    if target.platform != "cpu":
        return {}
    # LLVM dominates compile time on CPU. init of a 2-layer Llama: 0.9 s instead of 2.3 s.
    quickly = {"xla_backend_optimization_level": 1} if runs_once else {}
    return KEEP_OPTIMIZATION_BARRIERS | quickly


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
        **graph.facts,
    }


def compile(lowered: Lowered) -> Artifact:
    """Compile and serialize a program; its record contains what load() checks."""
    start_time = time.perf_counter()
    with capture_compiler_log() as replicated:
        compiled = _compile(lowered)
    seconds = time.perf_counter() - start_time
    payload, _, _ = serialize_executable.serialize(compiled)
    if lowered.target.platform == "cpu":
        from lowering.xla.cpu_collective_order import (
            serialize_collective_order,  # importing protobuf takes 0.03 s
        )

        payload = serialize_collective_order(payload)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    # What the CPU's time model counts; other machines have none that reads it.
    work = {"work": read_work(text).to_record()} if lowered.target.platform == "cpu" else {}
    record = lowered.facts | {
        "target": str(lowered.target),
        "compile_seconds": round(seconds, 3),
        "stablehlo_bytes": len(lowered.text),
        "fingerprint": fingerprint(compile_devices(lowered.target)),
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
        **read(text, lowered.plan.mesh, lowered.target.slices).to_record(),
        **work,
    }
    return Artifact(payload, record)


def _compile(lowered: Lowered) -> Any:
    try:
        return lowered.handle.compile(compiler_options=lowered.options)
    except jax.errors.JaxRuntimeError as error:
        if not private.is_out_of_memory(error):
            raise
        raise OutOfMemory(lowered.name, lowered.target, str(error)) from None


def _peak(memory: Any, target: Target) -> int:
    """Return the peak device memory in bytes.

    XLA:CPU reports only the arguments. There it is the sum of arguments, temporaries and new
    outputs, which is an upper bound.
    """
    if target.platform == "cpu":
        new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new_outputs
    return memory.peak_memory_in_bytes


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


def fingerprint(placed_on: list[Device]) -> str:
    """Return a string that identifies the processor that compiled code depends on.

    For a CPU, XLA's digest of the devices and the instruction set. For an accelerator, properties
    that both the attached device and its ahead-of-time description have.
    """
    kind = placed_on[0]
    if kind.platform == "gpu":
        return f"compute capability {kind.compute_capability}"
    if kind.platform == "tpu":
        slices = f" in {count} slices" if (count := _slices(placed_on)) > 1 else ""
        return f"{kind.device_kind}, {kind.num_cores} cores, {len(placed_on)} devices{slices}"
    if any(device.process_index for device in placed_on):  # XLA's digest differs between processes
        return f"{len(placed_on)} devices, {host.processor()['features']}"
    return private.cpu_fingerprint(placed_on)


def forbid_tracing() -> AbstractContextManager[Any]:
    """Return a context in which tracing with JAX raises an error on this thread.

    Otherwise a single eager operation would compile in the middle of a run, on every host.
    """
    return private.forbid_tracing()


def to_devices(tree: Tree, described: Tree) -> Tree:
    """Copy host arrays to the devices, with the shardings of an executable's inputs().

    With several processes, each copies the shards of its own devices.
    """
    if distributed.count() == 1:
        return jax.device_put(tree, jax.tree.map(lambda array: array.sharding, described))

    def placed(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        host_array = np.asarray(array, like.dtype)
        return jax.make_array_from_callback(
            host_array.shape, like.sharding, lambda index: host_array[index]
        )

    return jax.tree.map(placed, tree, described)


def from_shards(
    described: Tree, read: Callable[[str, tuple[int, ...], tuple[slice, ...]], np.ndarray]
) -> Tree:
    """Create arrays on the devices; read each device's shard separately.

    Args:
        described: Shapes, dtypes and shardings.
        read: Function of a path, the unsharded shape and an index into it; returns that shard.
    """

    def make(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(
            like.shape,
            like.sharding,
            lambda index: read(path, like.shape, index or ()).astype(like.dtype, copy=False),
        )

    return unflatten({path: make(path, like) for path, like in flatten(described).items()})


def checkpoint_arrays(tree: Tree) -> Tree:
    """Return the tree as arrays that a checkpoint can write: JAX arrays, unchanged."""
    return tree


def memory_in_use() -> int:
    """Return the bytes in use on the fullest local device; on CPU, the process's resident bytes."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    bytes_in_use = [stat["bytes_in_use"] for stat in stats if stat]
    return max(bytes_in_use) if bytes_in_use else host.resident_bytes()


def peak_memory() -> int:
    """Return the peak bytes in use on any local device; on CPU, the process's resident peak."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat]
    return max(peaks) if peaks else host.peak_resident_bytes()
