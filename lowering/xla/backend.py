"""Backend for XLA (cpu, cuda, rocm and tpu): plan, lower, compile and load with JAX.

Only fresh compilations are serialized, with JAX's own compilation cache disabled: an executable
from a cache hit serializes to a broken payload (jaxlib 0.10.2).
"""

import time
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.experimental import serialize_executable

from lowering.artifact import Artifact
from lowering.errors import LoweringError, OutOfMemory
from lowering.graph import Graph
from lowering.hlo.collectives import read
from lowering.hlo.work import read_work
from lowering.lowered import Lowered
from lowering.machine.target import Target
from lowering.tracing.constrain import MEMORY_KINDS, sharding, use_placement
from lowering.tracing.cpu_hints import KEEP_OPTIMIZATION_BARRIERS
from lowering.tracing.current_target import trace_for_target
from lowering.trees import Tree, flatten, unflatten
from lowering.xla import private
from lowering.xla.arrays import checkpoint_arrays, from_shards, to_devices
from lowering.xla.compiler_log import capture_compiler_log
from lowering.xla.devices import (
    Device,
    compile_devices,
    devices,
    fingerprint,
    make_mesh,
    memory_in_use,
    peak_memory,
)
from lowering.xla.executable import load
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import Plan, make_plan
from sharding_rules.rules import Rules

# The functions of a backend.
__all__ = [
    "checkpoint_arrays",
    "compile",
    "compile_devices",
    "compiler_options",
    "devices",
    "forbid_tracing",
    "from_shards",
    "load",
    "lower",
    "make_mesh",
    "memory_in_use",
    "peak_memory",
    "plan_graph",
    "to_devices",
]

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


def forbid_tracing() -> AbstractContextManager[Any]:
    """Return a context in which tracing with JAX raises an error on this thread.

    Otherwise a single eager operation would compile in the middle of a run, on every host.
    """
    return private.forbid_tracing()
