"""Training in float16: the loss scale, skipped steps and resumption, on every kind of mesh."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from programs import CUBE, LLAMA, batch, loaded, placed_inputs, program, state_of

from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.checkpoints.steps import Retention
from graphtrain.config.schema import Batch, Mesh, Model, PipelineSettings, Precision, Program
from lowering.trees import Tree, flatten

HALF = dataclasses.replace(LLAMA, dtype="float16")
TWO = Batch(global_batch_size=8, seq_len=16, microbatches=2)
ONE_DEVICE = program(model=HALF, batch=TWO)
LARGE = 1e6  # weight of a target, and minus it of another: the sum of the weights is as before

# A model that is written down once more in PyTorch, below.
TINY = Model(
    layers=1, embed=16, heads=2, mlp=32, vocab=32, positions="learned", max_position_embeddings=16,
    activation="gelu_tanh", dtype="float16", remat="none",
)  # fmt: skip
SCALING = Precision(initial_scale=4096.0, growth_interval=20)
LONG = program(model=TINY, batch=Batch(global_batch_size=8, seq_len=8), precision=SCALING)
STEPS, OVERFLOWS, RATE = 200, {3, 30, 31, 99, 100, 150}, 1e-3


def batches(of: Program, steps: int, overflows: set[int]) -> Iterator[dict[str, np.ndarray]]:
    for step in range(steps):
        made = batch(of, step)
        if step in overflows:
            made["weights"][..., 0, :2] = 1 + LARGE, 1 - LARGE
        yield made


def trained(of: Program, state: Tree, made: Any) -> tuple[Tree, list[dict[str, float]]]:
    step, metrics = loaded(of, "train"), []
    state = placed_inputs(step, "state", state)
    for one in made:
        out = step(state, placed_inputs(step, "batch", one), np.float32(RATE))
        state = out["state"]
        metrics.append({name: float(value) for name, value in out["metrics"].items()})
    return jax.device_get(state), metrics


@pytest.mark.parametrize(
    "settings",
    [
        {},
        CUBE,
        {
            "target": "cpu:2",
            "mesh": Mesh(data=2),
            "batch": dataclasses.replace(TWO, gradient_reduction="per_step"),
        },
        {"target": "cpu:2", "mesh": Mesh(stage=2)},
        {
            "target": "cpu:2",
            "mesh": Mesh(stage=2),
            "pipeline": PipelineSettings(schedule="1f1b"),
        },
    ],
    ids=["one device", "cube", "per step", "circular pipeline", "1f1b"],
)
def test_an_overflow_changes_the_scale_alone_on_every_mesh(settings):
    of = program(**{"model": HALF, "batch": TWO} | settings)
    made = list(batches(of, 3, {1}))
    before, first = trained(of, state_of(of), made[:1])
    skipped, second = trained(of, before, made[1:2])
    for part in ("parameters", "optimizer"):
        for path, array in flatten(before[part]).items():
            assert np.array_equal(array, flatten(skipped[part])[path]), f"{part}/{path}"
    assert skipped["step"] == 2
    scale = {name: float(value) for name, value in skipped["loss_scale"].items()}
    assert scale == {"scale": 32768.0, "good_steps": 0.0, "skipped_steps": 1.0}

    _, third = trained(of, skipped, made[2:])
    plain = trained(ONE_DEVICE, state_of(ONE_DEVICE), made)[1]
    for ours, reference in zip([*first, *second, *third], plain, strict=True):
        assert ours["loss_scale"] == reference["loss_scale"]
        assert ours["skipped_steps"] == reference["skipped_steps"]
        if np.isfinite(reference["grad_norm"]):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-3)
            assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)


def test_float16_has_the_loss_and_the_gradients_of_float32():
    made = list(batches(ONE_DEVICE, 1, set()))
    wide = dataclasses.replace(ONE_DEVICE, model=LLAMA)
    constant = dataclasses.replace(ONE_DEVICE, precision=Precision(loss_scale=1024.0))
    (full,), (half,) = (trained(of, state_of(of), made)[1] for of in (wide, ONE_DEVICE))
    (scaled,) = trained(constant, state_of(constant), made)[1]  # a constant scale has no state
    for name in ("loss", "grad_norm"):
        assert half[name] == pytest.approx(full[name], rel=1e-3)
        assert scaled[name] == pytest.approx(full[name], rel=1e-3)


def reference_loss(weights: dict[str, torch.Tensor], made: dict[str, np.ndarray]) -> torch.Tensor:
    """Loss of TINY with float32 weights and float16 products."""
    tokens, targets, counts = (
        torch.tensor(made[name][0]) for name in ("tokens", "targets", "weights")
    )

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weights[name]).half()

    def dot(equation: str, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.einsum(equation, x, weights[name].half())

    of = "layers/attention/"
    positions = weights["embedding/positions"].half()[: tokens.shape[1]]
    x = weights["embedding/tokens"].half()[tokens.long()] + positions
    y = norm(x, "layers/attention_norm/scale")
    query, key, value = (dot("bse,lehd->bhsd", y, of + n) for n in ("query", "key", "value"))
    scores = torch.einsum("bhqd,bhkd->bhqk", query.float(), key.float()) * query.shape[-1] ** -0.5
    hidden = torch.full(scores.shape[-2:], True).triu(1)
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1).half()
    x = x + dot("bqhd,lhde->bqe", torch.einsum("bhqk,bhkd->bqhd", shares, value), of + "output")
    y = dot("bse,lem->bsm", norm(x, "layers/mlp_norm/scale"), "layers/mlp/up").float()
    y = torch.nn.functional.gelu(y, approximate="tanh").half()
    x = x + dot("bsm,lme->bse", y, "layers/mlp/down")
    logits = norm(x, "final_norm/scale").float() @ weights["head"].half().float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.long().flatten(), reduction="none"
    )
    return (losses * counts.flatten()).sum() / counts.sum()


def test_scale_skipped_steps_and_losses_are_those_of_grad_scaler():
    state = state_of(LONG)
    made = list(batches(LONG, STEPS, OVERFLOWS))
    weights = {
        path: torch.tensor(np.array(array), requires_grad=True)
        for path, array in flatten(state["parameters"]).items()
    }
    matrices = [array for path, array in weights.items() if not path.endswith("scale")]
    others = [array for path, array in weights.items() if path.endswith("scale")]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=20)
    scales, losses = [], []
    for one in made:
        loss = reference_loss(weights, one)
        scales.append(scaler.get_scale())
        losses.append(loss.item())
        adamw.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(adamw)
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        scaler.step(adamw)
        scaler.update()

    _, metrics = trained(LONG, state, made)
    assert [one["loss_scale"] for one in metrics] == scales
    skipped = [step for step, one in enumerate(metrics) if not np.isfinite(one["grad_norm"])]
    assert set(skipped) == OVERFLOWS and metrics[-1]["skipped_steps"] == len(OVERFLOWS)
    assert min(scales) < 4096 < max(scales)
    usual = [step for step in range(STEPS) if step not in OVERFLOWS]
    ours = np.array([metrics[step]["loss"] for step in usual])
    np.testing.assert_allclose(ours, np.array(losses)[usual], rtol=1e-3)


def test_a_run_that_resumes_has_the_same_scale_losses_and_weights_bit_for_bit(tmp_path):
    made = list(batches(LONG, STEPS, OVERFLOWS))
    whole, metrics = trained(LONG, state_of(LONG), made)
    half, first = trained(LONG, state_of(LONG), made[:100])
    checkpoints, step = Checkpoints(tmp_path, Retention(1)), loaded(LONG, "train")
    checkpoints.save(100, placed_inputs(step, "state", half), {})
    checkpoints.wait()
    restored = checkpoints.restore(100, step.inputs("state")).state
    checkpoints.close()
    resumed, second = trained(LONG, jax.device_get(restored), made[100:])
    np.testing.assert_equal([*first, *second], metrics)
    for path, array in flatten(whole).items():
        assert np.array_equal(array, flatten(resumed)[path]), path
