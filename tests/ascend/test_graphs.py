"""Whole graphs for Ascend: what is in the files, and what they compute."""

import dataclasses
import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from programs import CUBE, LLAMA, batch, loaded, lower, placed_inputs, program, state_of

from graphtrain.config.schema import Batch, Mesh, MixtureOfExperts
from lowering.ascend import backend, mindir
from lowering.ascend.emitter import NUMPY
from lowering.ascend.per_rank import fill_in_rank, rank_groups
from lowering.ascend.schema import TENSOR_TYPES
from lowering.ascend.translate import translate
from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.per_device.normalize import normalize_module
from lowering.trees import flatten
from lowering.xla.spmd_module import partition_spmd

BFLOAT16 = dataclasses.replace(LLAMA, dtype="bfloat16")
ROOMY = MixtureOfExperts(experts=4, experts_per_token=2, capacity_factor=1.0)
MIXTURE = dataclasses.replace(LLAMA, moe=ROOMY)
RATE = np.float32(1e-3)


def compiled(of, graph, target):
    of = dataclasses.replace(of, target=target)
    return backend.compile(lower(of, graph, backend))


@pytest.fixture(scope="module")
def cube():
    """The train step of one of 8 devices: data 2 x fsdp 2 x tensor 2, in bfloat16."""
    return compiled(program(**CUBE | {"model": BFLOAT16}), "train", "ascend910b:8")


def operators(model):
    kinds = {one.name: one for one in model.primitives}
    return [
        kinds[node.op_type.removeprefix("REF::")]
        for node in model.graph.node
        if node.op_type.startswith("REF::")
    ]


def test_collectives_are_those_of_hccl_with_the_groups_of_the_rank(cube):
    about = cube.record["ascend"]
    model = mindir.read(
        fill_in_rank(cube.payload, about["groups"], about["exchanges"], 5, "Ascend")
    )
    count = Counter(one.op_type for one in operators(model))
    assert count["AllReduce"] and count["AllGather"]
    groups = dict(rank_groups(about["groups"], 5, "Ascend"))
    named = {
        setting.s.decode()
        for one in model.primitives
        for setting in one.attribute
        if setting.name == "group"
    }
    assert named <= {*groups, "hccl_world_group"}
    assert all(5 in ranks for ranks in groups.values())
    # Devices are numbered along data, fsdp, tensor: 5 is the second of data and of tensor.
    assert [4, 5] in groups.values() and [5, 7] in groups.values()
    assert not any(b"graphtrain.group" in one.SerializeToString() for one in model.primitives)


def test_every_kind_of_collective_is_hccls_own():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))

    def every(x):
        lax, around = jax.lax, [(n, (n + 1) % 4) for n in range(4)]
        return (
            lax.psum(x, "data"),
            lax.pmax(x, "tensor"),
            lax.all_gather(x, "tensor"),
            lax.psum_scatter(x, "tensor", tiled=True),
            lax.all_to_all(x, "tensor", 0, 0, tiled=True),
            lax.ppermute(x, "tensor", around),
        )

    whole = jax.sharding.PartitionSpec()
    function = jax.shard_map(every, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    normalised = normalize_module(
        partition_spmd(jax.jit(function).lower(np.ones((8, 3), np.float32))).hlo,
        name="test",
        ranks=8,
    )
    graph = translate(normalised, name="test", ranks=8, native=True, in_place={})
    model = mindir.read(fill_in_rank(graph.mindir, graph.groups, graph.exchanges, 5, "Ascend"))
    found = {}
    for one in operators(model):
        if any(setting.name == "group" for setting in one.attribute):
            of = {each.name: each for each in one.attribute}
            kind = of["op"].s.decode() if one.op_type == "AllReduce" else one.op_type
            found[kind] = of
    groups = dict(rank_groups(graph.groups, 5, "Ascend"))
    ranks = {kind: groups.get(of["group"].s.decode(), "all") for kind, of in found.items()}
    tensor = [4, 5, 6, 7]
    assert ranks == {
        "sum": [1, 5],
        "max": tensor,
        "AllGather": tensor,
        "ReduceScatter": tensor,
        "AlltoAll": tensor,
        "NeighborExchange": "all",
    }
    assert found["AllGather"]["rank_size"].i == found["ReduceScatter"]["rank_size"].i == 4
    assert found["ReduceScatter"]["op"].s == b"sum"
    split = {name: found["AlltoAll"][name].i for name in ("split_count", "split_dim", "concat_dim")}
    assert split == {"split_count": 4, "split_dim": 0, "concat_dim": 0}
    exchange = found["NeighborExchange"]
    assert [one.ints[0] for one in exchange["recv_rank_ids"].values] == [4]
    assert [one.ints[0] for one in exchange["send_rank_ids"].values] == [6]


def test_on_cpus_a_program_that_gathers_is_given_its_rank():
    of = program(target="cpu:2", mesh=Mesh(fsdp=2))  # whose evaluation asks for no rank itself
    artifact = compiled(of, "evaluate", "ascend-cpu:2")
    assert artifact.record["ascend"]["rank_input"]
    kinds = {one.op_type for one in operators(mindir.read(artifact.payload))}
    assert "AllReduce" in kinds and "AllGather" not in kinds


def test_a_device_computes_in_bfloat16_and_a_cpu_in_float32(cube):
    def types(payload):
        nodes = mindir.read(payload).graph.node
        return Counter(
            tensor.data_type for node in nodes for one in node.attribute for tensor in one.tensors
        )

    on_cpu = compiled(program(**CUBE | {"model": BFLOAT16}), "train", "ascend-cpu:8")
    kept, widened = types(cube.payload), types(on_cpu.payload)
    assert kept[TENSOR_TYPES["bf16"]] > 100
    # There bfloat16 is rounded to, and nothing is computed in it.
    model = mindir.read(on_cpu.payload)
    rounded = [
        node
        for node in model.graph.node
        if any(t.data_type == TENSOR_TYPES["bf16"] for a in node.attribute for t in a.tensors)
    ]
    assert widened[TENSOR_TYPES["bf16"]] == len(rounded)
    assert {node.op_type.partition(":")[2][1:].partition(":")[0] for node in rounded} == {"Cast"}


def test_state_is_written_in_place(cube):
    about, record = cube.record["ascend"], cube.record
    state = [path for path in record["inputs"] if path.startswith("state/")]
    assert len(about["variables"]) == len(state)
    model = mindir.read(cube.payload)
    assert len(model.graph.parameter) == len(state)
    written = sum(one.op_type == "Assign" for one in operators(model))
    assert written == len(state) - 1  # the key of random bits stays as it is
    assert len(about["returned"]) == len(record["outputs"]) - len(state)


def test_exchanges_name_both_neighbours_and_leave_no_rank_out():
    of = program(
        target="cpu:8",
        mesh=Mesh(data=2, stage=4),
        batch=Batch(global_batch_size=8, seq_len=16, microbatches=4),
        model=dataclasses.replace(LLAMA, layers=4),
    )
    artifact = compiled(of, "train", "ascend910b:8")
    about = artifact.record["ascend"]
    assert about["exchanges"]
    for sources in about["exchanges"]:
        assert sorted(sources) == list(range(8))
    model = mindir.read(
        fill_in_rank(artifact.payload, about["groups"], about["exchanges"], 3, "Ascend")
    )
    exchange = next(one for one in operators(model) if one.op_type == "NeighborExchange")
    settings = {one.name: one for one in exchange.attribute}
    sources = about["exchanges"][0]
    assert [one.ints[0] for one in settings["recv_rank_ids"].values] == [sources[3]]
    assert [one.ints[0] for one in settings["send_rank_ids"].values] == [sources.index(3)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"model": dataclasses.replace(LLAMA, remat="full")}, {"model": MIXTURE}],
    ids=["plain", "recomputed", "mixture"],
)
def test_three_steps_equal_those_of_xla(mindspore, tmp_path, settings):
    of = program(target="cpu:1", mesh=Mesh(), **settings)
    theirs = loaded(of, "train")
    artifact = compiled(of, "train", "ascend-cpu:1")
    about, record = artifact.record["ascend"], artifact.record
    path = tmp_path / "train.mindir"
    path.write_bytes(fill_in_rank(artifact.payload, about["groups"], about["exchanges"], 0, "CPU"))
    paths = [
        path
        for name in record["arguments"]
        for path in record["inputs"]
        if path == name or path.startswith(f"{name}/")
    ]
    state, given = state_of(of), batch(of)
    values = {**flatten(state, "state"), **flatten(given, "batch"), "learning_rate": RATE}

    def tensor(number):
        stored = about["stored"][number][1]
        return mindspore.Tensor(np.asarray(values[paths[number]]).astype(NUMPY[stored]))

    variables = {f"input{n}": tensor(n) for n in about["variables"]}
    net = mindspore.nn.GraphCell(mindspore.load(str(path)), params_init=variables)
    arguments = [tensor(n) for n in range(len(paths)) if n not in about["variables"]]
    current = placed_inputs(theirs, "state", state)
    for _ in range(3):
        returned = net(*arguments)
        expected = theirs(current, placed_inputs(theirs, "batch", given), RATE)
        names = list(record["outputs"])
        metrics = {names[n]: one for n, one in zip(about["returned"], returned, strict=True)}
        loss = float(metrics["metrics/loss"].asnumpy().reshape(-1)[0])
        assert loss == pytest.approx(float(expected["metrics"]["loss"]), abs=1e-5)
        current = expected["state"]
    held = net.parameters_dict()
    for output, number in about["aliases"]:
        name = list(record["outputs"])[output]
        want = np.asarray(flatten(expected)[name])
        ours = held[f"input{number}"].asnumpy().reshape(want.shape)
        np.testing.assert_allclose(ours, want, atol=1e-4, err_msg=name)


def test_bytes_are_equal_across_processes(cube):
    script = (
        "import hashlib, test_graphs as t;"
        "of = t.program(**t.CUBE | {'model': t.BFLOAT16});"
        "print(hashlib.sha256(t.compiled(of, 'train', 'ascend910b:8').payload).hexdigest())"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=here,
        env={
            **__import__("os").environ,
            "PYTHONPATH": f"{here}:{here.parent / 'graphs'}:{here.parents[1]}",
        },
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == hashlib.sha256(cube.payload).hexdigest()


def test_arrays_of_the_host_and_steps_of_many_hosts_are_refused(cube):
    with pytest.raises(LoweringError, match=r"is for ascend910b:8"):
        backend.load(cube, Target.parse("ascend910b:4"))
