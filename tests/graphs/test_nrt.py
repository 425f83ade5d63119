"""Loading and running a NEFF, against a runtime without devices."""

import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron import backend, device
from lowering.neuron.device import NeffProgram
from lowering.neuron.nrt import Runtime
from lowering.xla import backend as xla
from sharding_rules.mesh import MeshShape

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("nrt") / "libnrt.so.1"
    source = Path(__file__).with_name("fake_nrt.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", made, source], check=True)
    return str(made)


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "calls"
    monkeypatch.setenv("FAKE_NRT_LOG", str(path))
    return path


@pytest.fixture
def runtime(library, log, monkeypatch) -> Runtime:
    monkeypatch.setenv("GRAPHTRAIN_LIBNRT", library)
    device.runtime.cache_clear()
    yield device.runtime()
    device.runtime.cache_clear()


def fact(shape, dtype, split):
    return {"shape": shape, "dtype": dtype, "split": split, "memory": "device"}


RECORD = {
    "graph": "train",
    "arguments": ["state", "rate"],
    "inputs": {
        "rate": fact([], "float32", []),
        "state/head": fact([8, 2], "bfloat16", [["tensor"], []]),
    },
    "outputs": {
        "loss": fact([], "float32", []),
        "state/head": fact([8, 2], "bfloat16", [["tensor"], []]),
    },
    "neuron": {"rank_input": True, "aliases": [[1, 0]]},
}
NEFF = b"output0=input1 output1=input0"


def mesh(devices: int):
    placed_on = xla.devices(Target.parse(f"cpu:{devices}"))
    return xla.make_mesh(MeshShape({"tensor": devices}), placed_on)


def test_one_rank_is_loaded_without_collectives(runtime, log):
    runtime.load(b"neff", core=3, rank=0, ranks=1).unload()
    assert log.read_text().splitlines() == [
        "init framework=1", "load size=4 core=3 count=-1", "unload",
    ]  # fmt: skip


def test_what_the_runtime_refuses_is_said_in_words(runtime):
    with pytest.raises(LoweringError, match=r"nrt_load .* returned 2: invalid: a bad NEFF"):
        runtime.load(b"", core=0, rank=0, ranks=1)


def test_a_tensor_gives_back_what_was_written_and_is_freed(runtime, log):
    tensor = runtime.tensor(4, core=1)
    tensor.write(b"abcd")
    assert tensor.read() == b"abcd"
    del tensor
    assert log.read_text().splitlines()[1:] == [
        "tensor placement=0 core=1 size=4", "write size=4", "free",
    ]  # fmt: skip


def test_state_stays_on_the_cores_and_is_updated_in_place(runtime, log):
    program = NeffProgram(NEFF, RECORD, mesh(4))
    head = np.arange(16, dtype=jax.numpy.bfloat16).reshape(8, 2)
    results = program({"head": head}, np.float32(0.5))
    calls = log.read_text().splitlines()
    assert sorted(call for call in calls if call.startswith("load")) == [
        f"load_collectives core={rank} count=-1 rank={rank} ranks=4" for rank in range(4)
    ]
    assert float(results["loss"]) == 0.5
    before = results["state"]["head"]
    log.write_text("")
    results = program(results["state"], np.float32(0.25))
    written = [call for call in log.read_text().splitlines() if call.startswith("write")]
    assert written == ["write size=4"] * 4  # the rate, for each rank, and nothing of the state
    assert before.is_deleted()
    with pytest.raises(RuntimeError, match="was donated"):
        before.to_host()
    stored = backend.checkpoint_arrays(results)["state"]["head"]
    assert isinstance(stored, jax.Array)
    assert stored.sharding.shard_shape(stored.shape) == (2, 2)
    np.testing.assert_array_equal(np.asarray(stored), head)


def test_an_array_on_the_cores_that_is_split_otherwise_is_refused(runtime):
    whole = {"state/head": fact([8, 2], "bfloat16", [[], []])}
    other = RECORD | {"inputs": RECORD["inputs"] | whole}
    state = NeffProgram(NEFF, RECORD, mesh(4))({"head": np.zeros((8, 2))}, 0.5)["state"]
    with pytest.raises(
        LoweringError, match=r"sharded as .*tensor.* was passed to the compiled train"
    ):
        NeffProgram(NEFF, other, mesh(4))(state, 0.5)


def test_every_rank_is_told_its_number(runtime):
    record = RECORD | {"neuron": {"rank_input": True, "aliases": []}}
    record["outputs"] = {"rank": fact([], "uint32", [])}
    results = NeffProgram(b"output0=input2", record, mesh(4))({"head": np.zeros((8, 2))}, 0.0)
    ranks = [np.frombuffer(each.read(), np.uint32)[0] for each in results["rank"].tensors]
    assert ranks == [0, 1, 2, 3]


def test_more_ranks_than_cores_are_refused(runtime):
    with pytest.raises(LoweringError, match=r"is for 8 Neuron cores; this process sees 4"):
        NeffProgram(NEFF, RECORD, mesh(8))


def test_a_machine_without_the_runtime_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("GRAPHTRAIN_LIBNRT", "/nowhere/libnrt.so.1")
    with pytest.raises(LoweringError, match=r"not found on this machine .*aws-neuronx-runtime-lib"):
        Runtime()
