"""A run's state goes from any mesh and pipeline to any other, bit for bit."""

import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from graphtrain.checkpoints.checkpoint import Checkpoints, restore_parameters
from graphtrain.checkpoints.info import read_checkpoint_info
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.layer_rows import StackedArray
from graphtrain.checkpoints.reshard import reshard
from graphtrain.checkpoints.steps import Retention
from graphtrain.checkpoints.strategy import Strategy, read_json, save_strategy, strategy_of
from graphtrain.cli.plan_show import show
from graphtrain.config import load_config, render
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Batch,
    Config,
    Data,
    Mesh,
    MixtureOfExperts,
    Model,
    Optimizer,
    PipelineSettings,
    Program,
    Run,
)
from graphtrain.errors import GraphtrainError, TrainingError
from graphtrain.models.pipeline_stages import to_pipeline_layout
from graphtrain.weights.sources import RunCheckpoint
from lowering.trees import flatten, unflatten

MODEL = Model(layers=5, embed=16, heads=4, mlp=24, vocab=32, moe=MixtureOfExperts(experts=4))


def program(mesh: Mesh, devices: int, **settings) -> Program:
    return Program(
        target=f"cpu:{devices}",
        mesh=mesh,
        model=settings.pop("model", MODEL),
        batch=Batch(global_batch_size=16, seq_len=8, microbatches=4),
        optimizer=Optimizer(moment_dtype="bfloat16"),
        **settings,
    )


# 5 layers: in one row each; over 2 stages with one row of zeros; in 2 rounds of 2 with three.
PROGRAMS = {
    "one": program(Mesh(), 1),
    "split": program(Mesh(fsdp=2, tensor=2, expert=2), 8),
    "uneven": program(
        Mesh(stage=2, tensor=2), 4, pipeline=PipelineSettings(layers_per_stage=(2, 3))
    ),
    "rounds": program(Mesh(stage=2, data=2), 4, pipeline=PipelineSettings(virtual_stages=2)),
    "zero": program(Mesh(data=4, tensor=2), 8, rules=("tensor", "zero1")),
}


@functools.cache
def strategy(name: str) -> Strategy:
    return strategy_of(resolve(PROGRAMS[name]))


def state_of(name: str) -> dict:
    """Random numbers on the devices of a program, the same numbers for every program."""
    random = np.random.default_rng(0)
    whole = {}
    for path, one in sorted(strategy("one").arrays.items()):
        numbers = random.integers(0, 1 << 16, one["shape"])
        whole[path] = np.asarray(numbers).astype(jnp.dtype(one["dtype"]))
    tree, stages = unflatten(whole), resolve(PROGRAMS[name]).stages
    if stages is not None:
        tree["parameters"] = to_pipeline_layout(tree["parameters"], stages)
        for moment in ("mu", "nu"):
            adam = tree["optimizer"]["adam"]
            adam[moment] = to_pipeline_layout(adam[moment], stages)
    described = describe(name)
    return jax.tree.map(lambda like, array: jax.device_put(array, like.sharding), described, tree)


def describe(name: str) -> dict:
    """Shapes, dtypes and shardings that the training step of a program takes."""
    sizes = {axis: size for axis, size in vars(PROGRAMS[name].mesh).items() if size > 1}
    count = int(np.prod([*sizes.values()]))
    devices = np.array(jax.devices()[:count]).reshape([*sizes.values()])
    mesh = jax.sharding.Mesh(devices, tuple(sizes))
    described = {}
    for path, one in strategy(name).arrays.items():
        split = jax.sharding.PartitionSpec(*[tuple(names) or None for names in one["split"]])
        placed = jax.sharding.NamedSharding(mesh, split)
        dtype = jnp.dtype(one["dtype"])
        described[path] = jax.ShapeDtypeStruct(tuple(one["shape"]), dtype, sharding=placed)
    return unflatten(described)


def assert_equal(got: dict, want: dict) -> None:
    got, want = flatten(got), flatten(want)
    assert got.keys() == want.keys()
    for path, array in want.items():
        assert got[path].sharding.is_equivalent_to(array.sharding, array.ndim), path
        assert np.asarray(got[path]).tobytes() == np.asarray(array).tobytes(), path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a run of each program, with a checkpoint of step 7."""
    path = tmp_path_factory.mktemp("runs")
    for name, one in PROGRAMS.items():
        run = Run(directory=str(path / name), steps=9, data=Data(train="data"))
        (path / name).mkdir()
        (path / name / "config.toml").write_text(render(Config(program=one, run=run)))
        (path / name / "metrics.jsonl").write_text("{}\n")
        checkpoints = Checkpoints(
            path / name / "checkpoints", Retention(2), layer_order_of(resolve(one))
        )
        checkpoints.save(7, state_of(name), {"epoch": 3})
        checkpoints.close()
    return path


def restore(directory: Path, name: str) -> dict:
    checkpoints = Checkpoints(
        directory / "checkpoints", Retention(2), layer_order_of(resolve(PROGRAMS[name]))
    )
    saved = checkpoints.restore(7, describe(name))
    checkpoints.close()
    assert (saved.step, saved.data_position) == (7, {"epoch": 3})
    return saved.state


def quiet(done: int, count: int) -> None:
    """Show nothing."""


@pytest.mark.parametrize("wanted", PROGRAMS)
def test_a_run_goes_on_from_the_checkpoint_of_any_other(wanted, runs):
    for saved in PROGRAMS:
        assert_equal(restore(runs / saved, wanted), state_of(wanted))
    parameters = restore_parameters(
        runs / "rounds/checkpoints",
        7,
        describe(wanted)["parameters"],
        layer_order_of(resolve(PROGRAMS[wanted])),
    )
    assert_equal(parameters, state_of(wanted)["parameters"])


@pytest.mark.parametrize(
    ("saved", "wanted"), [("split", "rounds"), ("rounds", "uneven"), ("uneven", "zero")]
)
def test_offline_it_is_the_checkpoint_that_the_other_would_have_saved(
    saved, wanted, runs, tmp_path
):
    save_strategy(tmp_path / "wanted.json", resolve(PROGRAMS[wanted]))
    made = reshard(runs / saved, tmp_path / "made", tmp_path / "wanted.json", quiet)
    there, here = (
        read_checkpoint_info(one / "checkpoints", 7) for one in (runs / wanted, tmp_path / "made")
    )
    assert there == here and made.reordered > 0
    assert load_config(tmp_path / "made/config.toml").program == PROGRAMS[wanted]
    assert (tmp_path / "made/metrics.jsonl").read_text() == "{}\n"
    assert_equal(restore(tmp_path / "made", wanted), state_of(wanted))
    assert_equal(restore(tmp_path / "made", "one"), state_of("one"))
    # Weights go to other formats from there, too.
    got = RunCheckpoint(tmp_path / "made").read(["layers/mlp/up"], 3)[0]
    np.testing.assert_array_equal(got, state_of("one")["parameters"]["layers"]["mlp"]["up"][3])


def test_a_strategy_is_read_as_it_was_written_and_compiles_nothing(runs, tmp_path):
    config = runs / "rounds/config.toml"
    path = tmp_path / "strategy.json"
    words = [str(config), "--save-strategy", str(path), "--cache", str(tmp_path / "cache")]
    result = CliRunner().invoke(show, words)
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "cache").exists()
    assert read_json(path) == strategy("rounds")
    told = json.loads(path.read_text())
    assert told["rows"] == [0, None, 1, 2, 3, None, 4, None]
    path.write_text(json.dumps(told | {"graphtrain_strategy": 2}))
    with pytest.raises(GraphtrainError, match="is not a strategy file"):
        read_json(path)
    save_strategy(tmp_path / "strategy.ckpt", resolve(PROGRAMS["rounds"]))
    with pytest.raises(
        GraphtrainError, match=r"MindSpore's strategy format does not contain the optimizer"
    ):
        reshard(runs / "rounds", tmp_path / "made", tmp_path / "strategy.ckpt", quiet)
    with pytest.raises(GraphtrainError, match=r"unknown suffix of a strategy file; use .*\.json"):
        save_strategy(tmp_path / "strategy.txt", resolve(PROGRAMS["one"]))


def test_another_model_and_another_step_are_refused(runs, tmp_path):
    other = dataclasses.replace(PROGRAMS["one"], model=dataclasses.replace(MODEL, layers=4))
    save_strategy(tmp_path / "other.json", resolve(other))
    with pytest.raises(
        TrainingError, match=r"another model .* \[5, 16, 4, 4\] in the checkpoint and .* \[4,"
    ):
        reshard(runs / "rounds", tmp_path / "made", tmp_path / "other.json", quiet)
    with pytest.raises(TrainingError, match=r"no such checkpoint .* existing steps: 7"):
        reshard(runs / "one", tmp_path / "made", tmp_path / "other.json", quiet, step=6)
    assert not (tmp_path / "made").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from graphtrain.checkpoints.layer_rows import StackedArray
from graphtrain.checkpoints.reshard import reshard

def kill(done, count):
    if done == count // 2:
        os.kill(os.getpid(), signal.SIGKILL)

reshard(*map(Path, sys.argv[1:4]), kill)
"""


def test_a_killed_one_leaves_nothing_that_looks_whole(runs, tmp_path):
    source, made, to = runs / "one", tmp_path / "made", tmp_path / "rounds.json"
    save_strategy(to, resolve(PROGRAMS["rounds"]))
    words = [sys.executable, "-c", KILLED, str(source), str(made), str(to)]
    done = subprocess.run(words, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == -signal.SIGKILL
    assert not made.exists() and len(list(tmp_path.iterdir())) == 2
    reshard(source, made, to, quiet)
    assert_equal(restore(made, "rounds"), state_of("rounds"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "rounds.json"]


# After a failed write Orbax does not look at the errors of the other arrays, as in
# test_checkpoint.py.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_one_error(runs, tmp_path):
    to, disk = tmp_path / "rounds.json", tmp_path / "disk"
    save_strategy(to, resolve(PROGRAMS["rounds"]))
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with pytest.raises(GraphtrainError, match="cannot be written"):
            reshard(runs / "one", disk / "made", to, quiet)
        gc.collect()  # the errors that nobody looked at belong to this test
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("kind", ["muon", "adafactor", "schedule_free", "soap"])
@pytest.mark.parametrize("name", ["uneven", "rounds"])
def test_the_state_of_every_optimizer_has_the_rows_of_the_layers(kind, name):
    """So it is reordered for a pipeline as weights are, whatever its arrays' other axes."""
    optimizer = Optimizer(kind=kind)
    piped, alone = (
        strategy_of(resolve(dataclasses.replace(PROGRAMS[one], optimizer=optimizer)))
        for one in (name, "one")
    )
    assert piped.arrays.keys() == alone.arrays.keys()
    assert any(f"optimizer/{kind}/" in path and "/layers/" in path for path in piped.arrays)
    for path, array in piped.arrays.items():
        stacked = StackedArray(path, tuple(array["shape"]), piped.rows)
        assert list(stacked.shape_without_pipeline) == list(alone.arrays[path]["shape"]), path
