"""SOAP equals its authors' formula in float64, on one device and on meshes."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from programs import CUBE, program

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Optimizer
from graphtrain.graphs.optimizer import make_optimizer, moment_specs, pack
from graphtrain.models.matrices import is_hidden_matrix
from lowering.tracing.constrain import use_placement
from lowering.trees import flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import make_layout

STEPS, FREQUENCY, LARGEST, RATE = 50, 4, 16, 1e-2
SOAP = Optimizer(
    kind="soap", precondition_frequency=FREQUENCY, max_precondition_dim=LARGEST, clip_norm=0.0
)
SPECS = {
    "embedding/tokens": ArraySpec((16, 8), ("vocab", "embed")),
    "layers/attention/query": ArraySpec((2, 8, 2, 4), ("layers", "embed", "heads", "head_dim")),
    "layers/attention/output": ArraySpec((2, 2, 4, 8), ("layers", "heads", "head_dim", "embed")),
    "layers/mlp/up": ArraySpec((2, 3, 8, 16), ("layers", "experts", "embed", "mlp")),
    "layers/mlp/gate_up": ArraySpec((2, 8, 2, 24), ("layers", "embed", None, "mlp")),  # too long
    "layers/mlp_norm/scale": ArraySpec((2, 8), ("layers", "embed")),
}
# Each array as (stack, rows, columns), and back.
ORDERS = {"layers/mlp/gate_up": (0, 2, 1, 3)}
SIZES = {
    "layers/attention/query": (8, 8),
    "layers/attention/output": (8, 8),
    "layers/mlp/up": (8, 16),
    "layers/mlp/gate_up": (8, 24),
}
BATCH = Batch(global_batch_size=8, seq_len=16, microbatches=2)
MESHES = {
    "one device": {},
    "cube": CUBE,
    "zero": {"target": "cpu:8", "mesh": Mesh(data=4, fsdp=2), "rules": ("zero1", "fsdp")},
    "stages": {"target": "cpu:2", "mesh": Mesh(stage=2), "batch": BATCH},
}


def stack_of(path: str, array: np.ndarray) -> np.ndarray:
    ordered = array.transpose(ORDERS.get(path, range(array.ndim)))
    return ordered.reshape(-1, *SIZES[path])


def array_of(path: str, stack: np.ndarray) -> np.ndarray:
    order = ORDERS.get(path, tuple(range(len(SPECS[path].shape))))
    ordered = stack.reshape([SPECS[path].shape[index] for index in order])
    return ordered.transpose(np.argsort(order))


def numbers() -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    random = np.random.default_rng(0)
    weights = {path: random.normal(size=spec.shape) for path, spec in SPECS.items()}
    gradients = [
        {path: random.normal(size=spec.shape) for path, spec in SPECS.items()} for _ in range(STEPS)
    ]
    return weights, gradients


def trained(settings: dict) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights after all steps, and the state after the first of them."""
    of = resolve(program(**settings))
    made = make_optimizer(SOAP, unflatten(SPECS))
    devices = np.asarray(jax.devices()[: of.mesh.devices]).reshape(tuple(of.mesh.axes.values()))
    mesh = jax.sharding.Mesh(devices, tuple(of.mesh.axes))

    def placed(arrays: dict) -> dict:
        layouts = {path: make_layout(path, SPECS[path], of.rules, of.mesh) for path in arrays}
        splits = {
            path: PartitionSpec(*(names or None for names in layout.split))
            for path, layout in layouts.items()
        }
        on_mesh = {path: NamedSharding(mesh, split) for path, split in splits.items()}
        return unflatten(
            {path: jax.device_put(np.float32(arrays[path]), on_mesh[path]) for path in arrays}
        )

    def step(carried, gradient):
        parameters, state = carried
        with use_placement(mesh, of.rules):
            updates, state = made.update(gradient, state, parameters, learning_rate=RATE)
        return (jax.tree.map(jax.numpy.add, parameters, updates), state), pack(state)

    @jax.jit
    def train(parameters, gradients):
        carried, states = jax.lax.scan(step, (parameters, made.init(parameters)), gradients)
        return carried[0], jax.tree.map(lambda array: array[0], states)

    weights, gradients = numbers()
    stacked = {path: np.stack([one[path] for one in gradients]) for path in SPECS}
    singles = unflatten({path: np.float32(array) for path, array in stacked.items()})
    parameters, first = train(placed(weights), singles)
    specs = moment_specs(jax.eval_shape(made.init, parameters), SPECS, SOAP)
    assert {path: one.shape for path, one in flatten(first).items()} == {
        path: spec.shape for path, spec in flatten(specs).items()
    }
    return flatten(jax.device_get(parameters)), flatten(jax.device_get(first))


def wanted(first: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights by the authors' formula, in float64.

    An eigenbasis of the first gradient's squares is not unique: the one that was found is taken,
    after a test that it is one.
    """
    weights, gradients = numbers()
    for path, spec in SPECS.items():
        decay = 0.0 if "norm" in path else 0.1
        given = [one[path] for one in gradients]
        if not is_hidden_matrix(spec):
            weights[path] = adamw(weights[path], given, decay)
            continue
        found = {
            side: first[f"soap/{side}_basis/{path}"]
            for side in ("left", "right")
            if f"soap/{side}/{path}" in first
        }
        bases = {side: one.reshape(-1, *one.shape[-2:]) for side, one in found.items()}
        stacks = zip(
            stack_of(path, weights[path]),
            np.stack([stack_of(path, one) for one in given], 1),
            strict=True,
        )
        made = [
            of_matrix(weight, each, {side: one[index] for side, one in bases.items()}, decay)
            for index, (weight, each) in enumerate(stacks)
        ]
        weights[path] = array_of(path, np.stack(made))
    return weights


def adamw(weight: np.ndarray, gradients: list[np.ndarray], decay: float) -> np.ndarray:
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for step, g in enumerate(gradients, 1):
        mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g**2
        root = np.sqrt(square / (1 - 0.95**step)) + 1e-8
        weight = weight - RATE * (mean / (1 - 0.9**step) / root + decay * weight)
    return weight


def of_matrix(
    weight: np.ndarray, gradients: np.ndarray, bases: dict[str, np.ndarray], decay: float
) -> np.ndarray:
    """Train one matrix: https://github.com/nikhilvyas/SOAP, with decay before the update."""
    rows, columns = weight.shape
    assert bases.keys() == {
        side for side, size in (("left", rows), ("right", columns)) if size <= LARGEST
    }
    left = bases.get("left", np.eye(rows)).astype(np.float64)
    right = bases.get("right", np.eye(columns)).astype(np.float64)
    squares = {"left": np.zeros((rows, rows)), "right": np.zeros((columns, columns))}
    mean, variance = np.zeros_like(weight), np.zeros_like(weight)
    for step, g in enumerate(gradients):
        update = np.zeros_like(weight)
        if step:
            turned = left.T @ g @ right
            mean = 0.9 * mean + 0.1 * g
            variance = 0.95 * variance + 0.05 * turned**2
            scale = np.sqrt(1 - 0.95**step) / (1 - 0.9**step)
            update = scale * left @ (left.T @ mean @ right / (np.sqrt(variance) + 1e-8)) @ right.T
        weight = weight - RATE * (update + decay * weight)
        squares["left"] = 0.95 * squares["left"] + 0.05 * g @ g.T
        squares["right"] = 0.95 * squares["right"] + 0.05 * g.T @ g
        if step == 0:
            for side, basis in (("left", left), ("right", right)):
                if side in bases:
                    assert_eigenbasis(squares[side], basis)
        elif step % FREQUENCY == 0:
            if "left" in bases:
                left, order = iterated(squares["left"], left)
                variance = variance[order]
            if "right" in bases:
                right, order = iterated(squares["right"], right)
                variance = variance[:, order]
    return weight


def assert_eigenbasis(square: np.ndarray, basis: np.ndarray) -> None:
    np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-5)
    turned = basis.T @ square @ basis
    np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-5)
    assert (np.diff(np.diag(turned)) <= 1e-5).all()


def iterated(square: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-np.diag(basis.T @ square @ basis), kind="stable")
    return np.linalg.qr(square @ basis[:, order])[0], order


@pytest.mark.parametrize("mesh", MESHES)
def test_soap_is_the_formula_of_its_authors(mesh):
    found, first = trained(MESHES[mesh])
    start, _ = numbers()
    for path, array in wanted(first).items():
        assert np.abs(array - start[path]).max() > 1e-2, path
        np.testing.assert_allclose(found[path], array, atol=3e-5, rtol=0, err_msg=path)
