"""Every kind of optimizer on every mesh: the state of one device, and what Muon sends."""

import functools
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Literal

import jax
import numpy as np
import pytest
import reference_training
import torch
from programs import CUBE, batch, loaded, lower, placed_inputs, program, state_of

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, Optimizer, Program
from graphtrain.cost_model.traffic import predict_collectives
from graphtrain.cost_model.update_flops import update_flops
from graphtrain.planning.moved import ParameterIndex
from graphtrain.planning.reasons import Reasons
from lowering.hlo.collectives import Collective
from lowering.trees import flatten
from lowering.xla import backend as xla

KINDS = {
    "adamw": Optimizer(),
    "muon": Optimizer(kind="muon"),
    "lion": Optimizer(kind="lion"),
    "sgd": Optimizer(kind="sgd"),
    "adafactor": Optimizer(kind="adafactor"),
    "schedule_free": Optimizer(kind="schedule_free"),
    "ema": Optimizer(ema_decay=0.9),
}
SIZES = Batch(global_batch_size=8, seq_len=16, microbatches=2)
WIDE = Batch(global_batch_size=16, seq_len=16, microbatches=2)
MESHES = {"one device": {}, "cube": CUBE, "stages": {"target": "cpu:2", "mesh": Mesh(stage=2)}}
ZERO = {"target": "cpu:8", "mesh": Mesh(data=4, fsdp=2), "rules": ("zero1", "fsdp")}


# Learning rates at which training is no chaos: with AdamW at 1e-2, two float32 runs whose sums
# differ in their order are 2e-1 of the way apart after 50 steps, and at 1e-3 they are 5e-7.
RATES = {"sgd": 0.1, "adafactor": 1e-2}
STEPS = 50
# Of weights near 1, which norms have: 50 roundings to float32, of 6e-8 each, are up to 3e-6.
ROUNDED = 5e-6


def after_steps(of, steps=3, rate=1e-2):
    """State after steps from that of seed 0, on the host."""
    train = loaded(of, "train")
    state = placed_inputs(train, "state", state_of(of))
    for step in range(steps):
        inputs = placed_inputs(train, "batch", batch(of, step))
        state = train(state, inputs, np.float32(rate))["state"]
    return flatten(jax.device_get(state))


@functools.cache
def after_all_steps(kind, mesh):
    of = program(optimizer=KINDS[kind], batch=SIZES, **MESHES[mesh])
    return after_steps(of, STEPS, RATES.get(kind, 1e-3))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ema"])
@pytest.mark.parametrize("mesh", ["one device", "cube", "stages"])
def test_weights_after_50_steps_are_those_of_pytorch_in_float64(kind, mesh, monkeypatch):
    """Of torch.optim, else of the authors' formula; SOAP's are in test_soap.py."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)  # of Muon's iteration
    rate = RATES.get(kind, 1e-3)
    start = flatten(state_of(program())["parameters"])
    found = after_all_steps(kind, mesh)
    for path, array in reference_training.trained(kind, SIZES, rate, STEPS).items():
        assert np.abs(array - start[path]).max() > 100 * ROUNDED, path
        np.testing.assert_allclose(
            found[f"parameters/{path}"], array, rtol=0, atol=ROUNDED, err_msg=path
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", ["cube", "stages"])
def test_state_after_50_steps_equals_that_of_one_device(kind, mesh):
    wanted, found = after_all_steps(kind, "one device"), after_all_steps(kind, mesh)
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        if array.dtype != np.float32:
            np.testing.assert_array_equal(found[path], array, err_msg=path)
            continue
        # Sums in another order: 5e-6 of the largest value were measured, 5e-7 in weights.
        largest = max(np.abs(array).max(), 1e-30)
        np.testing.assert_allclose(found[path], array, rtol=0, atol=2e-5 * largest, err_msg=path)


@pytest.mark.parametrize("kind", ["muon", "schedule_free"])
def test_so_does_it_with_zero(kind):
    """Matrices are split over two axes in one dimension, and some devices have none of them."""
    wanted = after_steps(program(optimizer=KINDS[kind], batch=WIDE))
    found = after_steps(program(optimizer=KINDS[kind], batch=WIDE, **ZERO))
    for path, array in wanted.items():
        np.testing.assert_allclose(found[path], array, rtol=1e-4, atol=3e-5, err_msg=path)


def test_so_it_does_with_int8_moments_but_for_values_between_two_integers():
    optimizer = Optimizer(moment_dtype="int8")
    wanted = after_steps(program(optimizer=optimizer, batch=WIDE))
    found = after_steps(program(optimizer=optimizer, batch=WIDE, **ZERO))
    assert any(array.dtype == np.int8 for array in found.values())
    for path, array in wanted.items():
        if array.dtype == np.int8:
            apart = np.abs(array.astype(int) - found[path])
            assert apart.max() <= 1 and apart.mean() < 0.01, path
        else:
            near = np.isclose(found[path], array, rtol=1e-4, atol=3e-5)
            assert near.mean() > 0.99, path
            np.testing.assert_allclose(found[path], array, rtol=1e-2, atol=2e-3, err_msg=path)


MODEL = Model(layers=8, embed=1024, heads=8, mlp=4096, vocab=4096)
SMALL = 100_000  # bytes: norms, and sums of the loss


def for_h100(kind: Literal["muon", "adamw", "soap"], **settings) -> Program:
    sizes = Batch(global_batch_size=64, seq_len=256)
    optimizer = Optimizer(kind=kind)
    defaults = {"target": "h100:8", "model": MODEL, "batch": sizes, "optimizer": optimizer}
    return program(**defaults | settings)


def sent(found: Iterable[Collective], *ops: str) -> float:
    return sum(one.wire_bytes_per_step for one in found if one.op in ops and one.bytes > SMALL)


@pytest.mark.skipif(not find_spec("jax_plugins"), reason="no jax_plugins")
@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": Mesh(fsdp=8), "rules": ("fsdp",)},
        {"mesh": Mesh(fsdp=4, tensor=2), "rules": ("fsdp", "tensor")},
    ],
    ids=["fsdp", "fsdp-tensor"],
)
def test_muon_exchanges_shards_and_gathers_no_matrix(settings):
    """As estimated, also its FLOPs, and with a rule as the reason of each; AdamW's gathers."""
    programs = {"muon": for_h100("muon", **settings), "adamw": for_h100("adamw", **settings)}
    lowered = {kind: lower(of, "train") for kind, of in programs.items()}
    records = {kind: xla.compile(each).record for kind, each in lowered.items()}
    muon, adamw = (
        [Collective.from_record(one) for one in records[kind]["collectives"]] for kind in records
    )
    added = [one for one in muon if "/muon/" in one.scope]
    assert {one.op for one in added} == {"all-to-all"}
    assert sent(muon, "all-gather") <= 1.01 * sent(adamw, "all-gather")
    gradients = [one for one in adamw if one.dtype == "f32"]
    assert sent(added, "all-to-all") <= 2 * sent(gradients, "reduce-scatter", "all-reduce")
    more = records["muon"]["flops"] - records["adamw"]["flops"]
    assert update_flops(resolve(programs["muon"])) / 8 == pytest.approx(more, rel=0.02)
    estimated = [predict_collectives(resolve(of)) for of in programs.values()]
    of_muon, of_adamw = (sent(each, "all-to-all") for each in estimated)
    assert of_muon - of_adamw == pytest.approx(sent(added, "all-to-all"))
    of = resolve(programs["muon"])
    index = ParameterIndex(lowered["muon"].plan, of.rules)
    for one in added:
        moved = index.classify(one)
        assert moved.kind == "matrices of Muon"
        assert "parameters." in str(Reasons(of, index).find(one, moved, one.axes[0]))


@pytest.mark.skipif(not find_spec("jax_plugins"), reason="no jax_plugins")
def test_soap_exchanges_shards_and_gathers_no_matrix():
    """As estimated; AdamW's gathers."""
    settings = {"mesh": Mesh(fsdp=4, tensor=2), "rules": ("fsdp", "tensor")}
    small = Model(layers=4, embed=256, heads=4, mlp=512, vocab=512)
    of = for_h100("soap", **settings, model=small)
    record = xla.compile(lower(of, "train")).record
    found = [Collective.from_record(one) for one in record["collectives"]]
    added = [one for one in found if "/soap/" in one.scope]
    assert {one.op for one in added} == {"all-to-all"}
    plain = predict_collectives(resolve(for_h100("adamw", **settings, model=small)))
    wanted = predict_collectives(resolve(of))
    estimated = sent(wanted, "all-to-all") - sent(plain, "all-to-all")
    assert sent(added, "all-to-all") == pytest.approx(estimated, rel=0.02)


def test_norms_of_modules_are_those_of_the_state():
    of = program(
        optimizer=Optimizer(group_norms=True), batch=SIZES, target="cpu:2",
        mesh=Mesh(fsdp=2),
    )  # fmt: skip
    train = loaded(of, "train")
    state = placed_inputs(train, "state", state_of(of))
    before = flatten(jax.device_get(state["parameters"]))
    outputs = train(state, placed_inputs(train, "batch", batch(of, 0)), np.float32(1e-2))
    after, metrics = flatten(jax.device_get(outputs["state"]["parameters"])), outputs["metrics"]
    modules = {path.rpartition("/")[0] or path for path in before}
    named = {name for name in metrics if "_norm." in name}
    assert named == {
        f"{norm}.{module.replace('/', '.')}"
        for norm in ("parameter_norm", "update_norm")
        for module in modules
    }
    for module in modules:
        paths = [path for path in before if (path.rpartition("/")[0] or path) == module]
        for name, arrays in {
            "parameter_norm": [before[path] for path in paths],
            "update_norm": [after[path] - before[path] for path in paths],
        }.items():
            wanted = np.sqrt(sum(np.square(array.astype(np.float64)).sum() for array in arrays))
            found = metrics[f"{name}.{module.replace('/', '.')}"]
            np.testing.assert_allclose(found, wanted, rtol=1e-3, err_msg=f"{name} of {module}")
