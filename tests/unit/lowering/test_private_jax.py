"""Canaries: each private interface of JAX, jaxlib and XLA in lowering/xla/private.py still works.

Run these first with a new version of JAX. A failure names the function and what to do.
"""

import contextlib
import pickle
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from canaries import guarded_functions, make_canary, public_functions
from jax.core import ShapedArray
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowering.hlo.proto import read_module
from lowering.xla import private

REMEDIES = {
    "distributed_state": "jax/_src/distributed.py: find where `global_state` went, or a public "
    "key-value store. All runs of several processes need it.",
    "initialize_distributed": "jax/_src/distributed.py, State.initialize: find how a callback for "
    "the loss of the service is set now. If its argument can be converted to Python, remove the "
    "terminate handler. Without both, a lost rank ends the others with SIGABRT.",
    "slurm_coordinator": "jax/_src/clusters/slurm_cluster.py: find how the address of a Slurm step "
    "is computed now, or compute it here. Runs that srun starts need it.",
    "service_answers": "jax/_src/distributed.py: find another question that the service answers. "
    "Without it an exception of C++ is taken for the loss of rank 0, or the reverse.",
    "start_distributed_service": "jax/_src/distributed.py, State.initialize: find how it starts "
    "the service now. Only compiling for cpu:PxD in one process needs it.",
    "connect_distributed_client": "jax/_src/distributed.py, State.initialize: find how it connects "
    "now. Only compiling for cpu:PxD in one process needs it.",
    "start_cpu_client": "jax/_src/xla_bridge.py, make_cpu_client: find the client's new arguments. "
    "Only compiling for cpu:PxD in one process needs it.",
    "forbid_tracing": "jax/_src/config.py: find `no_tracing`, or a public guard. Without it a run "
    "would compile in silence; do not replace it by a null context.",
    "cpu_fingerprint": "jax/_src/cache_key.py, _hash_devices: use the digest that JAX's cache uses "
    "now. It must differ between instruction sets.",
    "initialize_lapack": "jaxlib/lapack.py, prepare_lapack_call: find what it calls first. Without "
    "it a run with the optimizer SOAP on a CPU crashes.",
    "change_pickled_executable": "jax/experimental/serialize_executable.py: find how the "
    "executable stands in the pickle, and change the search for 'exec'.",
    "split_executable": "xla/python/pjrt_ifrt, SerializeExecutable: find the new header. If "
    "ExecutionGraph in xla/runtime shares one resource between nested sequences now, remove "
    "lowering/xla/cpu_collective_order.py and this function.",
    "is_out_of_memory": "jax.errors.JaxRuntimeError: find how it tells exhausted memory.",
    "replicated_arrays": "xla/service/spmd/spmd_partitioner.cc: find the new sentence of "
    "'Involuntary full rematerialization', or a public report.",
    "hlo_text": "jaxlib: find who reads a serialized HloModuleProto and prints it with options.",
    "stablehlo": "jaxlib/mlir.cc: find who converts HLO to StableHLO. neuron-sim needs it.",
    "stablehlo_function": "jax/_src/interpreters/mlir.py: find merge_mlir_modules, and how a "
    "primitive is lowered. Extracted PyTorch/XLA graphs need it.",
    "sharding_axes": "jax/_src/sharding_impls.py: find parse_flatten_op_sharding. Extracted "
    "PyTorch/XLA graphs need it.",
    "compile_replicas": "jax/_src/compiler.py: find how it compiles now. neuron-sim needs it.",
    "load_replicas": "jax/_src/compilation_cache.py: find how it loads now. neuron-sim needs it.",
    "run_replicas": "jax/_src/interpreters/pxla.py, ExecuteReplicated: find how it runs and what "
    "it does with the result. neuron-sim needs it.",
}


canary = make_canary(
    private,
    REMEDIES,
    f"jax {jax.__version__} changed a private interface.",
)


def test_every_private_interface_has_a_canary_and_a_remedy():
    public = public_functions(private)
    assert public == guarded_functions(globals()) == set(REMEDIES)


# In a process of its own: it changes JAX's state.
_TWO_RANKS = """
import os, sys, threading, jax
from lowering.xla import private
address = sys.argv[1]
service = private.start_distributed_service(address, 2)
clients = {}
def join(rank):
    clients[rank] = private.connect_distributed_client(address, rank, 60)
threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
[each.start() for each in threads]; [each.join() for each in threads]
made = []
other = threading.Thread(
    target=lambda: made.append(private.start_cpu_client(clients[1], 1, 2, 3)), daemon=True
)
other.start()
state = private.distributed_state()
assert (state.process_id, state.num_processes, state.client) == (0, 1, None), vars(state)
assert hasattr(state, "coordinator_address") and hasattr(state, "preemption_sync_manager")
state.service, state.client, state.process_id, state.num_processes = service, clients[0], 0, 2
assert private.service_answers()
clients[0].key_value_set("a", "b")
assert clients[1].blocking_key_value_get("a", 1000) == "b"
for rank in (0, 1):
    clients[rank].key_value_set(f"words/1/{rank}", str(rank))
waiting = threading.Thread(target=lambda: clients[1].wait_at_barrier("words/1/", 60000))
waiting.start(); clients[0].wait_at_barrier("words/1/", 60000); waiting.join()
assert sorted(clients[1].key_value_dir_get("words/1/")) == [("words/1/0", "0"), ("words/1/1", "1")]
clients[0].key_value_delete("words/1/")
assert clients[1].key_value_dir_get("words/1/") == []
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
print([device.process_index for device in jax.devices("cpu")], flush=True)
os._exit(0)  # without waiting for the other rank, which is this process
"""


@canary("slurm_coordinator")
def test_jax_says_where_the_processes_of_a_slurm_step_connect(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4099")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[07-09],other")
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    assert private.slurm_coordinator() == f"node07:{65536 - 4096 + 3}"
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "77")
    assert private.slurm_coordinator() == "node07:77"


@canary(
    "distributed_state",
    "service_answers",
    "start_distributed_service",
    "connect_distributed_client",
    "start_cpu_client",
)
def test_one_process_registers_the_devices_of_two():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, "-c", _TWO_RANKS, address], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split("\n")[0] == "[0, 0, 0, 1, 1, 1]", done.stderr


@canary("forbid_tracing")
def test_tracing_is_forbidden_on_this_thread():
    array, step = jnp.ones(3), jax.jit(lambda x: x + 41)
    with private.forbid_tracing(), pytest.raises(RuntimeError, match="trac"):
        step(array)
    assert step(array)[0] == 42


@canary("cpu_fingerprint")
def test_devices_have_a_fingerprint_that_stays():
    found = private.cpu_fingerprint(jax.devices("cpu"))
    assert len(found) == 16 and int(found, 16)
    assert found == private.cpu_fingerprint(jax.devices("cpu"))


@canary("initialize_lapack")
def test_a_process_that_lowers_nothing_calls_lapack(tmp_path):
    compiled = jax.jit(lambda x: jnp.linalg.qr(x)[1]).lower(jnp.eye(4)).compile()
    (tmp_path / "program").write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    load = f"""
import pickle, numpy as np
from pathlib import Path
from jax.experimental import serialize_executable
from lowering.xla import private
private.initialize_lapack()
step = serialize_executable.deserialize_and_load(
    *pickle.loads(Path({str(tmp_path / "program")!r}).read_bytes())
)
print(abs(np.asarray(step(np.eye(4, dtype=np.float32)))).sum())
"""
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=True)
    assert done.stdout == "4.0\n"


@canary("change_pickled_executable", "split_executable")
def test_a_serialized_executable_is_found_and_put_back():
    one = {"backend": jax.devices()[0].client, "execution_devices": jax.devices()[:1]}
    compiled = jax.jit(lambda x: x * 2).lower(jnp.ones(4)).compile()
    payload, given, returned = serialize_executable.serialize(compiled)
    seen = []

    def change(stored):
        header, program = private.split_executable(stored)
        assert header + program == stored and header and program
        seen.append(stored)
        return stored

    changed = private.change_pickled_executable(payload, change)
    assert len(seen) == 1
    loaded = serialize_executable.deserialize_and_load(changed, given, returned, **one)
    np.testing.assert_array_equal(loaded(jnp.ones(4)), [2.0] * 4)
    with pytest.raises(Exception, match=r"."):  # the bytes that were changed are those loaded
        broken = private.change_pickled_executable(payload, lambda stored: stored[:99])
        serialize_executable.deserialize_and_load(broken, given, returned, **one)


@canary("is_out_of_memory")
def test_exhausted_memory_is_told_from_other_errors():
    with pytest.raises(jax.errors.JaxRuntimeError) as full:
        jax.block_until_ready(jax.jit(lambda: jnp.zeros((1 << 30, 1 << 24)))())
    assert private.is_out_of_memory(full.value)
    assert not private.is_out_of_memory(RuntimeError("INVALID_ARGUMENT: no"))


def mesh():
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2), ("a", "b", "c"))


@canary("replicated_arrays")
def test_the_partitioner_reports_what_it_replicates(capfd):
    def step(x):
        before = NamedSharding(mesh(), PartitionSpec(("a", "b", "c")))
        after = NamedSharding(mesh(), PartitionSpec("b", "a"))
        placed = jax.lax.with_sharding_constraint(x, before)
        return jax.lax.with_sharding_constraint(jnp.sin(placed), after)

    jax.jit(step).lower(jnp.ones((16, 16, 16))).compile()
    found = list(private.replicated_arrays(capfd.readouterr().err))
    assert found and set(found[0]) == {"before", "after", "shape", "scope"}
    assert found[0]["shape"] == "f32[2,16,16]"


@pytest.fixture(scope="module")
def double():
    """HLO of a function of one array of 4 elements, and with a constant of 20."""
    ramp = np.arange(20, dtype=np.float32)
    lowered = jax.jit(lambda x: x * 2 + ramp[:4].sum() + jnp.asarray(ramp)[7]).lower(jnp.ones(4))
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


@canary("hlo_text")
def test_a_module_is_printed_with_its_constants(double):
    text = private.hlo_text(double)
    assert text.startswith("HloModule") and "ENTRY" in text
    constant = jax.jit(lambda: jnp.asarray(np.arange(50, 90))).lower()
    proto = constant.compiler_ir("hlo").as_serialized_hlo_module_proto()
    assert "88, 89" in private.hlo_text(proto)
    assert read_module(double).name in text


@canary("stablehlo", "compile_replicas", "load_replicas", "run_replicas")
def test_a_module_runs_on_two_replicas(double):
    devices = jax.devices("cpu")[:2]
    module = private.stablehlo(double)
    compiled = private.compile_replicas(module, devices, {"xla_backend_optimization_level": 0})
    loaded = private.load_replicas(compiled.serialize(), devices)
    parts = [jax.device_put(np.full(4, rank, np.float32), at) for rank, at in enumerate(devices)]
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
    array = jax.make_array_from_single_device_arrays((4,), sharding, parts)
    for program in (compiled, loaded):
        ((first, second),) = private.run_replicas(program, [array])
        np.testing.assert_array_equal(first, np.full(4, 13.0))
        np.testing.assert_array_equal(second, np.full(4, 15.0))


@canary("stablehlo_function")
def test_a_module_is_a_function_that_jax_traces(double):
    call = private.stablehlo_function(double, [ShapedArray((4,), jnp.dtype("float32"))])
    got = jax.jit(lambda x: call(x + 1)[0])(jnp.ones(4))
    np.testing.assert_array_equal(got, np.full(4, 17.0))


@canary("sharding_axes")
def test_a_sharding_is_read_as_mesh_axes():
    def proto(spec):
        sharding = NamedSharding(mesh(), spec)
        return sharding._to_xla_hlo_sharding(2).to_proto().SerializeToString()

    axes = {"a": 2, "b": 2, "c": 2}
    assert private.sharding_axes(proto(PartitionSpec(("a", "c"), "b")), axes) == [
        ("a", "c"),
        ("b",),
    ]
    with pytest.raises(ValueError, match="devices="):
        private.sharding_axes(proto(PartitionSpec(("a", "c"), "b")), {"a": 3, "b": 2})


@canary("initialize_distributed")
def test_the_loss_of_the_service_calls_a_function_instead_of_aborting():
    """Rank 0 is killed; rank 1 is told by its own function, and ends with its own status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = (
        "import os, sys; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        "from lowering.xla import private\n"
        "private.initialize_distributed(lambda: os._exit(75), num_processes=2,\n"
        f"    coordinator_address={address!r}, process_id=int(sys.argv[1]))\n"
        "print('joined', flush=True)\n"
        "import threading; threading.Event().wait()\n"  # until the function ends the process
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, rank],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "joined\n"
    both[0].kill()
    _, err = both[1].communicate(timeout=60)
    both[0].communicate()
    assert both[1].returncode == 75, err
    assert "terminate called" not in err and "Check failure" not in err
