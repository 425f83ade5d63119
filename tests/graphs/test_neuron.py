"""The road to Trainium: normalised HLO, and the simulator that runs it."""

import dataclasses
import hashlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import programs
import pytest
from programs import CUBE, LLAMA, batch, loaded, placed_inputs, program, state_of
from unoptimized import OPTIONS

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh
from graphtrain.graphs.build import build_graph
from lowering.errors import LoweringError, OutOfMemory
from lowering.hlo.proto import array_bytes, read_module, write_module
from lowering.hlo.replica_groups import parse_groups
from lowering.hlo.text import parse
from lowering.machine.target import Target
from lowering.neuron import backend, compiler, neff, preflight, simulation, simulator
from lowering.per_device.normalize import entry_of, normalize_module
from lowering.xla import backend as xla
from lowering.xla import private
from lowering.xla.spmd_module import partition_spmd

STAGES = {
    "target": "cpu:8",
    "mesh": Mesh(data=2, stage=2, tensor=2),
    "batch": Batch(global_batch_size=8, seq_len=16, microbatches=2),
}
RING = {
    "target": "cpu:8",
    "mesh": Mesh(data=4, context=2),
    "batch": Batch(global_batch_size=4, seq_len=16),
}
RECOMPUTED = CUBE | {"model": dataclasses.replace(LLAMA, dtype="bfloat16", remat="dots")}


def lower(of, graph, of_backend=backend):
    return programs.lower(of, graph, of_backend)


@pytest.fixture(scope="module")
def raw() -> bytes:
    """The train step of one of 8 devices, as XLA's partitioner leaves it."""
    return partition_spmd(lower(program(**CUBE), "train", xla).handle).hlo


@pytest.fixture(scope="module")
def module(raw):
    return read_module(normalize_module(raw, name="train", ranks=8).hlo)


def instructions(module):
    return [each for one in module.computations for each in one.instructions]


def test_every_collective_names_the_ranks_that_xla_prints(raw, module):
    printed = [
        parse_groups(each.rest, 8)
        for one in parse(private.hlo_text(raw)).computations.values()
        for each in one.instructions.values()
        if "replica_groups=" in each.rest
    ]
    written = [
        tuple(tuple(group.replica_ids) for group in each.replica_groups)
        for each in instructions(module)
        if each.replica_groups
    ]
    assert len(written) > 50
    assert sorted(written) == sorted(printed)


def test_ids_are_dense_and_fit_32_bits(module):
    ids = [each.id for each in instructions(module)]
    assert ids == list(range(1, len(ids) + 1))
    assert [each.id for each in module.computations] == list(range(1, len(module.computations) + 1))


def test_what_says_nothing_to_the_compiler_is_gone(module):
    kept = {field.name for each in instructions(module) for field, _ in each.ListFields()}
    assert not kept & {"metadata", "sharding", "statistics_viz", "channel_id"}
    assert not {field.name for field, _ in module.ListFields()} & {"stack_frame_index", "id"}


def test_inputs_and_outputs_have_names(module):
    entry = entry_of(module)
    named = [each for each in entry.instructions if each.frontend_attributes.map]
    parameters, root = named[:-1], named[-1]
    assert [each.frontend_attributes.map["neff_input_names"] for each in parameters] == [
        f"input{each.parameter_number}" for each in parameters
    ]
    names = root.frontend_attributes.map["neff_output_names"].split(",")
    assert root.id == entry.root_id and len(names) == len(root.operand_ids)


def test_the_whole_state_is_updated_in_place(module):
    state = build_graph(resolve(program(**CUBE)), "train").inputs["state"]
    entries = module.input_output_alias.entries
    assert len(entries) == len(jax.tree.leaves(state))
    parameters = module.host_program_shape.parameters
    for entry in entries:
        (output,) = entry.output_shape_index
        result = module.host_program_shape.result.tuple_shapes[output]
        assert result == parameters[entry.parameter_number]


def test_the_rank_is_an_input_and_nothing_else_asks_for_it(module):
    assert not [each for each in instructions(module) if each.opcode == "partition-id"]
    rank = entry_of(module).program_shape.parameters[-1]
    assert array_bytes(rank) == 4 and not rank.dimensions


def test_lines_of_the_model_are_kept_beside_the_module(raw):
    sources = normalize_module(raw, name="train", ranks=8).sources
    dots = [
        each for each in instructions(read_module(normalize_module(raw, name="train", ranks=8).hlo))
    ]
    lines = {sources[each.id] for each in dots if each.opcode == "dot" and each.id in sources}
    assert any(line.startswith("graphtrain/models/") for line in lines)


def test_a_field_that_the_reader_would_skip_is_refused(raw):
    module = read_module(raw)
    unknown = bytes([0xFA, 0x3E, 1, 1])  # field 1007, one byte
    changed = write_module(module) + unknown
    with pytest.raises(LoweringError, match="field 1007 of HloModuleProto"):
        normalize_module(changed, name="train", ranks=8)


_PRINT_DIGEST = """
import hashlib, sys
sys.path[:0] = sys.argv[1:]
from lowering.xla import backend as xla
from lowering.xla import private
from lowering.machine.target import Target
xla.devices(Target.parse("cpu:8"))
from programs import CUBE, program
import test_neuron
lowered = test_neuron.lower(program(**CUBE | {"target": "neuron-sim:8"}), "train")
print(hashlib.sha256(lowered.handle.hlo).hexdigest())
"""


def test_processes_agree_on_every_byte():
    here = lower(program(**CUBE | {"target": "neuron-sim:8"}), "train").handle.hlo
    paths = [path for path in sys.path if path]
    printed = subprocess.run(
        [sys.executable, "-c", _PRINT_DIGEST, *paths, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.split()[-1] == hashlib.sha256(here).hexdigest()


@pytest.mark.parametrize(
    "settings",
    [CUBE, RECOMPUTED, STAGES, RING],
    ids=["cube", "recomputed", "stages", "ring"],
)
def test_the_simulator_computes_what_xla_computes(settings):
    of = program(**settings)
    target = "neuron-sim:8"
    simulated = lower(program(**settings | {"target": target}), "train")
    devices = xla.devices(Target.parse("cpu:8"))
    executable = simulation.compile_module(simulated.handle.hlo, devices, OPTIONS)
    want = loaded(of, "train", traced_for=Target.parse(target))
    got = simulation.SimulatedProgram(executable, simulated.facts, want.mesh)
    states = [placed_inputs(want, "state", state_of(of)) for _ in range(2)]
    for step in range(3):
        inputs = xla.to_devices(batch(of, step), want.inputs("batch")), np.float32(1e-2)
        old = states[1]
        results = want(states[0], *inputs), got(states[1], *inputs)
        for name in ("loss", "grad_norm"):
            theirs, ours = (float(result["metrics"][name]) for result in results)
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        states = [result["state"] for result in results]
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)


def test_xla_optimizes_the_simulated_module_as_it_does_its_own():
    handle = lower(program(), "train", xla).handle
    devices = xla.devices(Target.parse("cpu:1"))
    quickly = {"xla_backend_optimization_level": 0}
    simulated = simulation.compile_module(partition_spmd(handle).hlo, devices, quickly)
    compiled = handle.compile(quickly)
    texts = compiled.as_text(), simulated.hlo_modules()[0].to_string()
    ours, theirs = (Counter(re.findall(r" = (\S+) ([a-z][\w-]*)\(", text)) for text in texts)
    assert ours == theirs and len(ours) > 50


def test_devices_draw_random_bits_as_neuron_can():
    lowered = lower(program(target="trn1:1"), "init")
    assert "rng-bit-generator" in lowered.text
    assert lowered.facts["outputs"]["state/key"]["shape"] == [4]


def test_arrays_in_the_hosts_memory_are_refused():
    from graphtrain.config.schema import Optimizer

    of = program(target="trn1:1", optimizer=Optimizer(offload_to_host=True))
    with pytest.raises(LoweringError, match=r"is stored in host memory.*offload_to_host = false"):
        lower(of, "train")


def simulate(tmp_path, hlo: bytes, *flags: str) -> int:
    (tmp_path / "model.hlo_module.pb").write_bytes(hlo)
    words = ["compile", "--framework=XLA", str(tmp_path / "model.hlo_module.pb"), "--output"]
    return simulator.main([*words, str(tmp_path / "model.neff"), "--target=trn1", *flags])


def module_of(step, *shapes: tuple[int, ...]) -> bytes:
    described = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return partition_spmd(jax.jit(step).lower(*described)).hlo


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (lambda x: jax.lax.cond(x[0] > 0, jax.numpy.sin, jax.numpy.cos, x), "EVRF001"),
        (lambda x: jax.numpy.fft.fft(x).real, "EVRF004"),
        (lambda x: jax.scipy.linalg.cholesky(x[:, None] * x), "EHCA005"),
    ],
    ids=["cond", "complex", "custom-call"],
)
def test_the_simulator_refuses_what_the_compiler_would_with_its_code(tmp_path, capfd, step, code):
    hlo = normalize_module(module_of(step, (8,)), name="train", ranks=1).hlo
    assert simulate(tmp_path, hlo) == 70
    assert f"[NCC_{code}]" in capfd.readouterr().err
    assert not (tmp_path / "model.neff").exists()


def test_the_simulator_refuses_what_no_device_can_hold(tmp_path, capfd):
    hlo = normalize_module(
        module_of(lambda x: x.sum() * 2, (2**32 + 8,)), name="train", ranks=1
    ).hlo
    assert simulate(tmp_path, hlo) == 70
    log = capfd.readouterr().err
    assert "[NCC_EOOM001] the inputs alone need 17.2 GB per device; a device has 17.2 GB" in log
    told = compiler.compile_error(70, log, graph="train", target=Target.parse("neuron-sim:1"))
    assert isinstance(told, OutOfMemory)


def test_the_simulator_refuses_a_module_that_is_not_normalised(tmp_path, capfd, raw):
    assert simulate(tmp_path, raw) == 70
    assert "pass a normalised module to the compiler" in capfd.readouterr().err


def test_the_simulator_refuses_a_file_that_is_no_module(tmp_path, capfd):
    assert simulate(tmp_path, b"module @jit_train {}") == 1
    assert "bytes are not an HloModuleProto" in capfd.readouterr().err


def test_what_the_simulator_writes_says_what_it_is(tmp_path):
    hlo = normalize_module(module_of(lambda x: x + 1, (8,)), name="train", ranks=1).hlo
    assert simulate(tmp_path, hlo, "--auto-cast=none", "--simulated-ranks=1") == 0
    written = (tmp_path / "model.neff").read_bytes()
    assert neff.is_simulated(written)
    assert neff.unpack(written)[0]["version"] == "0.0.0.0+simulator"


def test_the_rank_cannot_be_asked_for_in_a_conditional():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split = jax.sharding.PartitionSpec("data")

    def step(x):
        rank = jax.lax.axis_index("data")
        return jax.lax.cond(x[0] > 0, lambda: x + jax.lax.axis_index("data"), lambda: x + rank)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split)
    binary = partition_spmd(jax.jit(mapped).lower(jax.ShapeDtypeStruct((8,), np.float32))).hlo
    with pytest.raises(LoweringError, match="conditional reads the rank"):
        normalize_module(binary, name="train", ranks=4)


def test_a_program_that_would_be_refused_is_told_with_the_line_of_the_model():
    binary = module_of(lambda x: jax.lax.cond(x[0] > 0, jax.numpy.sin, jax.numpy.cos, x), (8,))
    normalised = normalize_module(binary, name="train", ranks=1)
    with pytest.raises(
        LoweringError, match=r"reject train, .*\n  \[NCC_EVRF001\].*test_neuron\.py:\d+\)"
    ):
        preflight.check(normalised.hlo, normalised.sources, "train", Target.parse("trn1:1"))
