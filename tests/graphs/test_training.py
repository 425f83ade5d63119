"""The training step against optax on one device, and what a loaded program promises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import LLAMA, batch, loaded, placed_inputs, program, state_of

from graphtrain.config.schema import Loss, Optimizer
from graphtrain.models.decoder import forward
from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target
from lowering.trees import flatten, unflatten
from lowering.xla import backend as xla


def reference_steps(of, state, batches, rate):
    """The same steps written with optax's own AdamW and loss."""
    settings = of.optimizer
    decays = {path: not path.endswith(("scale", "bias")) for path in flatten(state["parameters"])}
    transformation = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            rate,
            settings.beta1,
            settings.beta2,
            settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=lambda parameters: decays,
        ),
    )

    def loss(parameters, inputs):
        tree = unflatten(parameters)
        logits, _ = forward(of.model, tree, inputs["tokens"][0])
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            logits, inputs["targets"][0]
        )
        losses += of.loss.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
        return (losses * inputs["weights"][0]).sum() / inputs["weights"].sum()

    @jax.jit
    def step(parameters, optimizer, inputs):
        gradients = jax.grad(loss)(parameters, inputs)
        updates, optimizer = transformation.update(gradients, optimizer, parameters)
        return optax.apply_updates(parameters, updates), optimizer

    parameters = flatten(state["parameters"])
    optimizer = transformation.init(parameters)
    for inputs in batches:
        parameters, optimizer = step(parameters, optimizer, inputs)
    return parameters


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_steps_equal_optax_adamw(z_loss):
    # Adam divides a gradient by its own size: with an epsilon of 1e-8, a gradient of nearly zero
    # shows the order in which its sum was taken, which differs between processors.
    of = program(loss=Loss(z_loss=z_loss), optimizer=Optimizer(epsilon=1e-5))
    train = loaded(of, "train", optimized=True)
    state = loaded(of, "init", optimized=True)(np.uint32(0))["state"]
    batches = [batch(of, seed) for seed in range(4)]
    with trace_for_target(Target.parse(of.target)):
        want = reference_steps(of, jax.device_get(state), batches, 0.01)
    for inputs in batches:
        state = train(state, placed_inputs(train, "batch", inputs), np.float32(0.01))["state"]
    got = flatten(jax.device_get(state["parameters"]))
    for path, array in want.items():
        np.testing.assert_allclose(got[path], array, rtol=1e-4, atol=2e-6, err_msg=path)


def test_layers_written_out_compute_the_same_and_recompute_as_much():
    outputs, products = {}, {}
    for unroll in (1, 2):
        of = program(model=dataclasses.replace(LLAMA, remat="full", unroll=unroll))
        step = loaded(of, "gradients")
        state = placed_inputs(step, "state", state_of(of))
        outputs[unroll] = flatten(step(state, placed_inputs(step, "batch", batch(of))))
        products[unroll] = step.record["flops"]
    for path, array in outputs[1].items():
        np.testing.assert_allclose(outputs[2][path], array, rtol=1e-5, atol=1e-7, err_msg=path)
    assert products[1] == products[2]


def test_a_z_loss_adds_its_gradient_and_not_its_value():
    plain, with_z = program(), program(loss=Loss(z_loss=1.0))
    metrics = []
    for of in (plain, with_z):
        train = loaded(of, "train")
        state = placed_inputs(train, "state", state_of(of))
        metrics.append(
            train(state, placed_inputs(train, "batch", batch(of)), np.float32(0.1))["metrics"]
        )
    assert float(metrics[0]["loss"]) == pytest.approx(float(metrics[1]["loss"]), rel=1e-6)
    assert float(metrics[1]["grad_norm"]) > float(metrics[0]["grad_norm"])


def test_masked_targets_do_not_count():
    of = program()
    evaluate = loaded(of, "evaluate")
    parameters = loaded(of, "init")(np.uint32(0))["state"]["parameters"]
    inputs = {name: array[0] for name, array in batch(of).items()}
    other = inputs | {"targets": np.where(inputs["weights"] > 0, inputs["targets"], 3)}
    metrics = [
        jax.device_get(evaluate(parameters, placed_inputs(evaluate, "batch", given))["metrics"])
        for given in (inputs, other)
    ]
    assert metrics[0]["loss_sum"] == metrics[1]["loss_sum"]
    targets = inputs["weights"].sum()
    assert 0 < targets < inputs["weights"].size
    assert [one["targets"] for one in metrics] == [targets, targets]


def test_dropout_follows_the_step_and_not_the_process():
    of = program(model=dataclasses.replace(LLAMA, dropout=0.5))
    train = loaded(of, "train")
    losses = []
    for steps_before in (0, 0, 1):
        state = state_of(of) | {"step": np.int32(steps_before)}
        outputs = train(
            placed_inputs(train, "state", state),
            placed_inputs(train, "batch", batch(of)),
            np.float32(0),
        )
        losses.append(float(outputs["metrics"]["loss"]))
    assert losses[0] == losses[1] != losses[2]


def test_a_loaded_program_runs_where_tracing_is_forbidden():
    of = program()
    init, train = loaded(of, "init", optimized=True), loaded(of, "train", optimized=True)
    with xla.forbid_tracing():
        state = init(np.uint32(0))["state"]
        metrics = train(state, placed_inputs(train, "batch", batch(of)), np.float32(0.1))["metrics"]
        assert np.isfinite(float(metrics["loss"]))
        with pytest.raises(RuntimeError, match="no_tracing"):
            jnp.float32(1) + metrics["loss"]


def test_no_optimizer_setting_is_forgotten():
    of = program(optimizer=Optimizer(weight_decay=0.0, clip_norm=0.0))
    state = loaded(of, "train").inputs("state")
    assert set(state["optimizer"]) == {"adam"}
