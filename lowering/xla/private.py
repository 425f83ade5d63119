"""Private interfaces of JAX, jaxlib and XLA: all that this project uses, one function for each.

None of them is promised to stay. The functions were tried with jax 0.10.2 and 0.11.2, except where
one says otherwise. Each imports what it uses, so that a change upstream breaks that function alone.
tests/unit/lowering/test_private_jax.py calls each one and says what to do when it breaks.

May import nothing of this project but the errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

Device = Any  # jax.Device; type checkers reject it as a type


# --- Processes of a distributed run ---------------------------------------------------------------


def distributed_state() -> Any:
    """Return JAX's state of this process: its rank, the number of processes, and the client.

    The client's key-value store has no public API, and jax.process_index() would start a backend.
    """
    from jax._src import distributed

    return distributed.global_state


def slurm_coordinator() -> str:
    """Return the address, host:port, at which JAX lets the processes of a Slurm step connect.

    JAX computes it inside jax.distributed.initialize() only.
    """
    import os

    from jax._src.clusters.slurm_cluster import SlurmCluster

    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    port = os.environ.get("JAX_COORDINATOR_PORT")
    return given or SlurmCluster.get_coordinator_address(None, port)


def start_distributed_service(address: str, processes: int) -> Any:
    """Start the service to which the processes of a run connect.

    jax.distributed.initialize() would also connect this process, and wait for all others.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    return _jax.get_distributed_runtime_service(address, processes)


def connect_distributed_client(address: str, rank: int, timeout: int) -> Any:
    """Connect to the service as one rank; one process can connect as several.

    Args:
        address: host:port of the service.
        rank: rank to connect as.
        timeout: seconds to wait for the service.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    client = _jax.get_distributed_runtime_client(address, rank, init_timeout=timeout)
    client.connect()
    return client


def start_cpu_client(client: Any, rank: int, processes: int, devices: int) -> Any:
    """Start an XLA:CPU client that registers the devices of a rank.

    Public functions start one client in a process, with this process's own rank.
    """
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return xla_client.make_cpu_client(
        distributed_client=client, node_id=rank, num_nodes=processes, num_devices=devices
    )


def initialize_distributed(on_lost: Callable[[], None], **options: Any) -> None:
    """Call jax.distributed.initialize with a function that is called when the others are lost.

    Without it XLA ends the process with SIGABRT and a C++ stack trace as soon as the service, or
    the heartbeat of one process, is lost. A Python callback alone does not help: its argument, an
    absl::Status, has no conversion to Python (std::bad_cast), which terminates the process too.
    So `on_lost` is also set as the terminate handler of C++. It must not return.

    Args:
        on_lost: called on a thread of XLA, which waits for it forever.
        options: of jax.distributed.initialize.
    """
    import functools
    from unittest import mock

    import jax
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    if not _handle_terminate(on_lost):
        jax.distributed.initialize(**options)
        return
    connect = functools.partial(
        _jax.get_distributed_runtime_client, missed_heartbeat_callback=lambda status: on_lost()
    )
    with mock.patch.object(_jax, "get_distributed_runtime_client", connect):
        jax.distributed.initialize(**options)


_terminate_handlers: list[Any] = []  # C++ holds only their address


def _handle_terminate(on_lost: Callable[[], None]) -> bool:
    """Call `on_lost` where a C++ exception that nobody catches would end the process.

    If the service of the run still answers, the exception has another cause, and the process ends
    as before. Returns whether the handler could be set: JAX must use the shared libstdc++.
    """
    import ctypes

    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return False
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    function = ctypes.CFUNCTYPE(None)

    def terminate() -> None:
        if service_answers():
            function(previous)()
        on_lost()

    handler = function(terminate)
    _terminate_handlers.append(handler)
    previous = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    return True


def service_answers() -> bool:
    """Return whether the service answers within 3 s; after an error, the client may block."""
    import threading

    answered = threading.Event()

    def ask() -> None:
        try:
            distributed_state().client.key_value_try_get("graphtrain/nothing")
        except RuntimeError as error:
            if str(error).startswith("NOT_FOUND"):
                answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(3)


# --- Tracing --------------------------------------------------------------------------------------


def forbid_tracing() -> AbstractContextManager[Any]:
    """Return a context in which tracing with JAX raises an error on this thread.

    The option jax_no_tracing has no public context manager, and jax.config.update would set it for
    all threads.
    """
    from jax._src import config

    return config.no_tracing(True)


# --- Compiled programs ----------------------------------------------------------------------------


def cpu_fingerprint(devices: Sequence[Device]) -> str:
    """Return XLA's digest of CPU devices and their instruction set, which JAX's own cache uses.

    Without it, an executable for other instructions loads and then crashes the process; see
    https://github.com/jax-ml/jax/issues/28908 for what a wrong load looks like.
    """
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return f"{xla_client.get_topology_for_devices(devices).fingerprint():016x}"


def initialize_lapack() -> None:
    """Look up the LAPACK functions that executables for CPUs call.

    JAX does so when it lowers such a call. A process that only loads one calls a null pointer.
    """
    from jaxlib.cpu import _lapack

    _lapack.initialize()


def change_pickled_executable(payload: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return a payload of jax.experimental.serialize_executable with its executable changed.

    JAX pickles the executable, next to its shardings, as the bytes that follow the string "exec".
    Pickle frames are removed because their lengths would change; they are optional.
    """
    import pickle
    import pickletools

    steps = list(pickletools.genops(payload))
    ends = [position for _, _, position in steps[1:]] + [len(payload)]
    chunks, text = [], ""
    for (step, argument, begin), end in zip(steps, ends, strict=True):
        chunk = b"" if step.name == "FRAME" else payload[begin:end]
        if isinstance(argument, str):
            text = argument
        elif isinstance(argument, bytes) and text == "exec":
            changed = change(argument)
            chunk = pickle.BINBYTES8 + len(changed).to_bytes(8, "little") + changed
            text = ""
        chunks.append(chunk)
    return b"".join(chunks)


def split_executable(stored: bytes) -> tuple[bytes, bytes]:
    """Split an executable in IFRT's format into its header and XLA's program.

    The format is the length of a header as a varint, the header, and the program.
    Source: xla/python/pjrt_ifrt/pjrt_executable.cc, SerializeExecutable
    """
    length, begin = 0, 0
    while True:
        byte = stored[begin]
        length |= (byte & 0x7F) << (7 * begin)
        begin += 1
        if byte < 0x80:
            break
    begin += length
    return stored[:begin], stored[begin:]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a JaxRuntimeError says that memory is exhausted; it has no code to compare."""
    return "RESOURCE_EXHAUSTED" in str(error)


# Warning of the SPMD partitioner when it falls back to replicating an array. XLA reports it nowhere
# else: https://github.com/openxla/xla/issues/7148
_REPLICATED = (
    r"Involuntary full rematerialization\. .*? from sharding (?P<before>\{.*?\}(?: \w+\})?) "
    r"to (?P<after>\{.*?\}) efficiently for HLO operation %\S+ = (?P<shape>[^\s{]+)"
    r".*?op_name=\"(?P<scope>[^\"]*)\""
)


def replicated_arrays(log: str) -> Iterator[dict[str, str]]:
    """Yield shape, scope and both shardings of each array that the partitioner replicated.

    Args:
        log: what the compiler wrote to standard error.
    """
    return (match.groupdict() for match in re.finditer(_REPLICATED, log))


# --- HLO modules, which JAX has no public functions for -------------------------------------------
# "It's not in scope for JAX": https://github.com/jax-ml/jax/issues/21990


def hlo_text(hlo: bytes) -> str:
    """Return a serialized HloModuleProto as HLO text, including its constants."""
    client = _xla_client()
    options = client.hlo.HloPrintOptions()
    options.print_large_constants = True
    return client.hlo.HloModule.from_serialized_hlo_module_proto(hlo).to_string(options)


def stablehlo(hlo: bytes) -> bytes:
    """Return a serialized HloModuleProto as StableHLO bytecode, to be compiled."""
    return _xla_client()._xla.mlir.hlo_to_stablehlo(hlo)


def stablehlo_function(hlo: bytes, outputs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return an HLO module as a function of arrays that JAX can trace.

    Args:
        hlo: a serialized HloModuleProto.
        outputs: jax.core.ShapedArray of each output.
    """
    from jax._src.interpreters.mlir import merge_mlir_modules
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
    from jax.extend.core import Primitive
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    extension: Any = _jax
    module = extension.mlir.xla_computation_to_mlir_module(_xla_client().XlaComputation(hlo))
    call = Primitive("imported")
    call.multiple_results = True
    call.def_abstract_eval(lambda *inputs: list(outputs))

    def lowered(context: Any, *inputs: Any) -> Any:
        module_context = context.module_context
        called = ir.Module.parse(module, module_context.context)
        main: Any = ir.SymbolTable(called.operation)["main"]
        types = main.type.results  # read before merging invalidates it
        name = merge_mlir_modules(
            module_context.module, "imported", called, dst_symtab=module_context.symbol_table
        )
        symbol = ir.FlatSymbolRefAttr.get(name)
        return func.CallOp(types, symbol, list(inputs)).results

    mlir.register_lowering(call, lowered)
    return call.bind


def sharding_axes(sharding: bytes, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the mesh axes that split each dimension, for a serialized xla.OpSharding.

    Raises:
        ValueError: the sharding does not follow the axes of the mesh; the message shows it.
    """
    from jax._src.sharding_impls import parse_flatten_op_sharding
    from jax.sharding import AbstractMesh

    client = _xla_client()
    proto = client.OpSharding()
    proto.ParseFromString(sharding)
    try:
        dims = parse_flatten_op_sharding(proto, AbstractMesh(tuple(mesh.values()), tuple(mesh)))[0]
    except (ValueError, KeyError, NotImplementedError, AssertionError, StopIteration):
        raise ValueError(str(client.HloSharding.from_proto(proto))) from None
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in dims]


# --- Programs of replicas: one HLO module run on several CPU devices ------------------------------


def compile_replicas(module: bytes, devices: Sequence[Device], options: Mapping[str, Any]) -> Any:
    """Compile StableHLO bytecode for CPU devices, with one replica on each; jax.jit has none."""
    chosen = _replica_options(len(devices))
    chosen.env_option_overrides = [(name, str(each)) for name, each in options.items()]
    placed_on = _xla_client().DeviceList(tuple(devices))
    return devices[0].client.compile_and_load(module, placed_on, chosen)


def load_replicas(executable: bytes, devices: Sequence[Device]) -> Any:
    """Load the serialized result of `compile_replicas`."""
    placed_on = _xla_client().DeviceList(tuple(devices))
    return devices[0].client.deserialize_executable(
        executable, placed_on, _replica_options(len(devices))
    )


def run_replicas(executable: Any, arrays: Sequence[Any]) -> list[list[Any]]:
    """Run a program of replicas; return the arrays of each output, by device."""
    return executable.execute_sharded(arrays).disassemble_into_single_device_arrays()


def _replica_options(replicas: int) -> Any:
    import numpy as np

    client = _xla_client()
    options = client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = replicas
    options.num_partitions = build.num_partitions = 1
    ids = np.arange(replicas).reshape(replicas, 1)
    options.device_assignment = client.DeviceAssignment.create(ids)
    return options


def _xla_client() -> Any:
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return xla_client
