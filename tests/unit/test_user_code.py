"""Optimizers and losses of the user, by their name in a configuration."""

import colorsys
import dataclasses
import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from graphtrain.cache import Cache
from graphtrain.compile import worker
from graphtrain.compile.request_keys import request_keys
from graphtrain.config import load_config
from graphtrain.config.identity import differences, mathematics
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Config, Data, Loss, Mesh, Model, Optimizer, Program, Run
from graphtrain.config.user_code import UserCode
from graphtrain.errors import ConfigError, PlanError, TrainingError
from graphtrain.graphs.optimizer import make_optimizer
from graphtrain.graphs.plan import plan_program
from graphtrain.graphs.token_loss import weighted_loss
from graphtrain.graphs.user_code_of_parts import check_user_code_of_parts
from graphtrain.run.resume import check_identity
from lowering.machine import backends

EXAMPLES = Path(__file__).parents[2] / "examples/bring-your-own"
LION = Optimizer(custom=f"{EXAMPLES}/lion.py:lion", arguments={"beta1": 0.5}, clip_norm=0.0)
FOCAL = Loss(custom=f"{EXAMPLES}/focal.py:focal", arguments={"gamma": 2.0})
PROGRAM = Program(
    target="cpu:8",
    mesh=Mesh(fsdp=8),
    model=Model(layers=1, embed=16, heads=2, mlp=16, vocab=32, dtype="float32"),
    batch=Batch(global_batch_size=8, seq_len=8),
)


@pytest.fixture(autouse=True)
def path_of_its_own(monkeypatch):
    """Directories of imported files are on sys.path only during a test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def program(**settings):
    return resolve(dataclasses.replace(PROGRAM, **settings))


def test_the_optimizer_of_the_example_is_optax_lion():
    weights = {"w": jnp.array([0.5, -2.0])}
    gradients = {"w": jnp.array([1.0, -3.0])}
    ours = make_optimizer(LION, {})
    rate = jnp.float32(1.0)
    updates, _ = ours.update(gradients, ours.init(weights), weights, learning_rate=rate)
    theirs = optax.lion(1.0, b1=0.5, weight_decay=0.1)  # optax's own, with a learning rate
    expected, _ = theirs.update(gradients, theirs.init(weights), weights)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)


def test_its_state_is_sharded_like_the_parameters():
    layouts = plan_program(program(optimizer=LION)).layouts
    (moment,) = (path for path in layouts if path.startswith("state/optimizer") and "up" in path)
    assert moment.endswith("/mu/layers/mlp/up")
    assert layouts[moment].split == layouts["state/parameters/layers/mlp/up"].split != ((), (), ())
    assert not any("/nu/" in path for path in layouts)


def test_the_loss_of_the_example_is_weighted_by_the_loss_mask():
    random = np.random.default_rng(0)
    logits = random.normal(size=(2, 3, 5)).astype(np.float32)
    targets, weights = random.integers(0, 5, (2, 3)), np.array([[1, 0, 1], [0.5, 1, 0]], np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    prob = np.take_along_axis(probs, targets[..., None], -1)[..., 0]
    expected = (-((1 - prob) ** 2) * np.log(prob) * weights).sum()
    for value in weighted_loss(FOCAL, jnp.array(logits), jnp.array(targets), jnp.array(weights)):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("mesh", [Mesh(fsdp=8), Mesh(data=4, tensor=2)])
def test_a_training_step_with_both_can_be_traced_on_any_mesh(mesh):
    lowered = worker.lower(program(optimizer=LION, loss=FOCAL, mesh=mesh), "train")
    assert lowered.name == "train"


def test_an_edit_changes_the_keys_of_all_graphs_and_the_identity(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("RATE = 1\n")
    (tmp_path / "mine.py").write_text("import helper\nimport optax\ndef sgd(): return optax.sgd(1)")
    settings = {"optimizer": Optimizer(custom="mine.py:sgd")}
    first, run = request_keys(program(**settings)), Run(directory="r", steps=1, data=Data(train=""))
    saved = mathematics(Config(program=program(**settings).settings, run=run))
    (tmp_path / "helper.py").write_text("RATE = 2\n")
    second = request_keys(program(**settings))
    assert all(first[name] != second[name] for name in first)
    (difference,) = second["train"].differences(first["train"])
    assert difference.path == ("program", "optimizer", "custom", "sources", "helper.py")
    now = mathematics(Config(program=program(**settings).settings, run=run))
    assert list(differences(saved, now)) == ["program.optimizer.custom"]
    assert json.dumps(now)


def test_cache_explain_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def loss(logits, targets): return 0 * logits[..., 0]")
    made = program(loss=Loss(custom="mine.py:loss"))
    cache, stored = Cache(tmp_path / "cache"), request_keys(made)["evaluate"]
    cache.record_request(stored, stored, graph="evaluate")
    (tmp_path / "mine.py").write_text("def loss(logits, targets): return 1 * logits[..., 0]")
    (explanation,) = cache.explain_all({"evaluate": request_keys(made)["evaluate"]}).values()
    assert explanation.lines == ("loss custom sources mine.py changed",)


def test_a_file_edited_after_the_request_is_not_compiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import optax\ndef sgd(): return optax.sgd(1.0)")
    made = program(optimizer=Optimizer(custom="mine.py:sgd"))
    request = request_keys(made)["init"]
    (tmp_path / "mine.py").write_text("import optax\ndef sgd(): return optax.sgd(2.0)")
    with pytest.raises(PlanError, match="was edited meanwhile; compile again"):
        worker.compile_to_cache(
            made, "init", request, "", Cache(tmp_path), tmp_path, lambda text: None
        )


def test_a_local_file_that_it_imports_is_imported_again_and_no_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("")  # has the name of a library's file
    (tmp_path / "mine.py").write_text("import colorsys\nfrom helper_of_mine import VALUE as f\n")
    library = colorsys
    for value in (1, 20):
        (tmp_path / "helper_of_mine.py").write_text(f"VALUE = {value}\n")
        assert UserCode("program.loss.custom", "graphtrain.losses", "mine.py:f").load() == value
    assert sys.modules["colorsys"] is library


def test_a_file_is_imported_again_after_an_edit(tmp_path):
    code = UserCode("program.loss.custom", "graphtrain.losses", f"{tmp_path}/mine.py:f")
    for value in (1, 2):
        (tmp_path / "mine.py").write_text(f"def f(): return {value}  # {'x' * value}")
        assert code.call() == value


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("none.py:f", r'^program\.loss\.custom = "none\.py:f": none\.py not found; give the path'),
        ("json:nothing", "json has no nothing"),
        ("mine.py:", 'expected "file.py:name", "module:name" or an entry point'),
        ("nobody", "no installed package has an entry point of this name in the group"),
    ],
)
def test_a_wrong_name_is_an_error_of_the_user(reference, message):
    with pytest.raises(ConfigError, match=message):
        UserCode("program.loss.custom", "graphtrain.losses", reference).load()


def test_an_error_of_the_user_code_names_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def f():\n    return 1 / 0\n")
    code = UserCode("program.loss.custom", "graphtrain.losses", f"{tmp_path}/mine.py:f")
    with pytest.raises(ConfigError, match=r"raised ZeroDivisionError: .* \(mine\.py:2\)"):
        code.call()
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match="the import failed: ModuleNotFoundError"):
        code.call()


def test_what_is_no_optimizer_or_no_loss_of_tokens_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def optimizer(): return 3\ndef loss(logits, targets): return logits.mean()\n"
    )
    with pytest.raises(ConfigError, match=r"returned int, not an optax\.GradientTransformation"):
        make_optimizer(Optimizer(custom=f"{tmp_path}/mine.py:optimizer"), {})
    logits, targets = jnp.ones((2, 3, 5)), jnp.ones((2, 3), jnp.int32)
    with pytest.raises(ConfigError, match=r"returned \(\); it must return the loss of each token"):
        weighted_loss(Loss(custom=f"{tmp_path}/mine.py:loss"), logits, targets, jnp.ones((2, 3)))


def test_settings_of_adamw_and_of_cross_entropy_are_refused_beside_it():
    with pytest.raises(ValueError, match="beta1, weight_decay is only for AdamW; with custom"):
        Optimizer(custom="a.py:b", beta1=0.5, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"arguments are those of custom; set custom too"):
        Optimizer(arguments={"beta1": 0.5})
    with pytest.raises(ValueError, match="z_loss cannot be used with custom; remove it"):
        Loss(custom="a.py:b", z_loss=1e-4)


def test_an_entry_point_of_an_installed_package_is_used(monkeypatch):
    entry = EntryPoint("mine", "json:dumps", "graphtrain.losses")
    monkeypatch.setattr(backends, "_entry_points", lambda group: (entry,))
    code = UserCode("program.loss.custom", "graphtrain.losses", "mine")
    assert code.load() is json.dumps
    assert code.key_ingredients()["name"] == "json:dumps"


def test_all_permissions_that_an_edited_file_needs_are_suggested_at_once(tmp_path):
    identity = {"program.optimizer.custom": {"a.py": "1"}, "program.loss.custom": {"a.py": "1"}}
    edited = {name: {"a.py": "2"} for name in identity}
    info = SimpleNamespace(identity=identity)
    with pytest.raises(TrainingError) as raised:
        check_identity(tmp_path, info, edited, [])
    words = [f"--allow-change {name}" for name in identity]
    assert str(raised.value).endswith(f"permit it with {' '.join(words)}")


@pytest.mark.parametrize("name", ["lion.py", "focal.py", "lines.py"])
def test_the_page_shows_each_example_in_full(name):
    page = (EXAMPLES.parents[1] / "docs/guides/bring-your-own.md").read_text()
    source = (EXAMPLES / name).read_text()
    code = re.sub(r"\A(#.*\n)+\n*", "", source)
    assert f"```python\n{code}```" in page
    assert len(source.splitlines()) < 40


CODE_OF_PARTS = """
import jax.numpy as jnp
import optax


def of_tokens(logits, targets):
    return jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def of_positions(logits, targets):
    return of_tokens(logits, targets) * jnp.arange(targets.shape[1])


def of_sequences(logits, targets):
    return of_tokens(logits, targets) - of_tokens(logits, targets).mean(0)


def pair(logits, targets):
    return of_tokens(logits, targets), targets[0]


def lion():
    return optax.scale_by_lion()


def whole():
    return optax.stateless(lambda g, _: {k: x / jnp.sqrt(jnp.mean(x * x)) for k, x in g.items()})


def broken():
    return optax.stateless(lambda g, _: g["no such array"])
"""
PIPELINE = ["program.mesh.stage=2", "program.batch.microbatches=2"]
ONE_F = [*PIPELINE, 'program.pipeline.schedule="1f1b"']
RING = ["program.mesh={context=2}"]
UNEVEN = [*PIPELINE, "program.model.layers=3"]


@pytest.mark.parametrize(
    ("setting", "changes", "message"),
    [
        ("loss.custom=code.py:of_tokens", ONE_F, None),
        ("loss.custom=code.py:of_tokens", RING, None),
        ("loss.custom=code.py:of_positions", PIPELINE, None),
        ("loss.custom=code.py:of_positions", ONE_F, "other positions .* use .circular. or .gpipe"),
        ("loss.custom=code.py:of_positions", RING, "in another order; use .ulysses. instead"),
        (
            "loss.custom=code.py:of_sequences",
            [*PIPELINE, "program.mesh.data=2", "program.target=cpu:4"],
            "other sequences .* use a mesh without stage",
        ),
        (
            "loss.custom=code.py:of_sequences",
            ["program.mesh.data=2", "program.batch.gradient_reduction=per_step"],
            "other sequences .* use .per_microbatch.",
        ),
        (
            "loss.custom=code.py:of_sequences",
            ["program.batch.padding_sequences=1"],
            "other sequences .* adds empty sequences",
        ),
        ("loss.custom=code.py:pair", ONE_F, None),  # refused where it is traced
        ("optimizer.custom=code.py:lion", UNEVEN, None),
        ("optimizer.custom=code.py:whole", PIPELINE, None),
        ("optimizer.custom=code.py:whole", UNEVEN, "a number of layers that the stages divide"),
        ("optimizer.custom=code.py:broken", UNEVEN, "KeyError: 'no such array'"),
    ],
)
def test_code_that_would_compute_something_else_of_parts_is_refused(
    tmp_path, monkeypatch, setting, changes, message
):
    """Parts of a sequence, of a batch, and arrays with rows of zeros for uneven stages."""
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text(CODE_OF_PARTS)
    Path("a.toml").write_text(
        '[program]\ntarget = "cpu:2"\nmodel = {layers = 2, embed = 8, heads = 2, mlp = 8, '
        "vocab = 16}\nbatch = {global_batch_size = 8, seq_len = 16}\n"
        '[run]\ndirectory = "run"\nsteps = 1\ndata = {train = "data"}\n'
    )
    program = resolve(load_config(Path("a.toml"), [f"program.{setting}", *changes]).program)
    if message is None:
        check_user_code_of_parts(program)
        return
    with pytest.raises(ConfigError, match=message):
        check_user_code_of_parts(program)
