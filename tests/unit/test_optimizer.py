import dataclasses

import jax
import jax.numpy as jnp
import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, MixtureOfExperts, Model, Optimizer, Program
from graphtrain.errors import ConfigError
from graphtrain.graphs.optimizer import _is_matrix, make_optimizer, pack, unpack
from graphtrain.models.decoder import parameter_specs
from graphtrain.models.matrices import (
    MatrixAxes,
    Move,
    group_matrices,
    is_hidden_matrix,
    matrix_axes,
)
from graphtrain.models.optimizer_support import check_optimizer
from graphtrain.models.preconditioners import preconditioner_specs
from lowering.errors import LoweringError
from lowering.trees import flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

GPT2 = Model(
    layers=2, embed=8, heads=2, mlp=16, vocab=32, positions="learned", max_position_embeddings=8,
    norm="layer", activation="gelu_tanh", bias="all",
)  # fmt: skip

MIXTURE = Model(
    layers=2, embed=8, heads=2, mlp=16, vocab=32, bias="qkv", moe=MixtureOfExperts(experts=4)
)


BIASED = dataclasses.replace(
    MIXTURE,
    moe=MixtureOfExperts(experts=4, expert_bias=True, dense_layers=1, dense_mlp=24),
)
MODELS = [GPT2, Model(layers=2, embed=8, heads=2, mlp=16, vocab=32), BIASED]


@pytest.mark.parametrize("model", MODELS)
def test_matrices_decay_and_norms_and_biases_do_not(model):
    for path, spec in flatten(parameter_specs(model)).items():
        name = path.rpartition("/")[2]
        assert _is_matrix(spec) == (name != "scale" and not name.endswith("bias")), path


@pytest.mark.parametrize("settings", [Optimizer(), Optimizer(weight_decay=0.0, clip_norm=0.0)])
def test_packed_state_unpacks_to_itself(settings):
    state = make_optimizer(settings, {"w": ArraySpec((3,), ("embed",))}).init({"w": jnp.ones(3)})
    again = unpack(pack(state), state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert list(flatten(pack(state))) == ["adam/count", "adam/mu/w", "adam/nu/w"]


SPECS = {
    "layers/norm/scale": ArraySpec((2, 16), ("layers", "embed")),
    "layers/mlp/up": ArraySpec((2, 16, 64), ("layers", "embed", "mlp")),
}


def after_steps(settings: Optimizer, steps: int):
    """Return parameters and packed state after steps down a noisy quadratic."""
    optimizer = make_optimizer(settings, unflatten(SPECS))
    start = {path: jnp.ones(spec.shape) for path, spec in SPECS.items()}
    parameters, noise = unflatten(start), jax.random.key(0)

    @jax.jit
    def step(parameters, state, number):
        key = jax.random.fold_in(noise, number)
        gradients = jax.tree.map(
            lambda array: 0.1 * array + jax.random.normal(key, array.shape), parameters
        )
        updates, state = optimizer.update(gradients, state, parameters, learning_rate=1e-2)
        return jax.tree.map(jnp.add, parameters, updates), state

    state = optimizer.init(parameters)
    for number in range(steps):
        parameters, state = step(parameters, state, number)
    return flatten(parameters), flatten(pack(state))


@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd", "muon"])
def test_int8_moments_follow_those_in_float32(kind):
    """Half the distance between two integers at each step, so that the paths stay close."""
    wanted, exact = after_steps(Optimizer(kind=kind, weight_decay=0.0), 50)
    found, state = after_steps(Optimizer(kind=kind, weight_decay=0.0, moment_dtype="int8"), 50)
    part = next(path.removesuffix("/layers/mlp/up") for path in exact if path.endswith("mlp/up"))
    values = state[f"{part}/values/layers/mlp/up"]
    scales = state[f"{part}/scales/layers/mlp/up"]
    assert values.dtype == jnp.int8 and scales.shape == (2, 16)
    error = jnp.abs(values * scales[..., None] - exact[f"{part}/layers/mlp/up"])
    assert (error <= 4 * scales[..., None]).all()  # rounding of earlier steps decays
    norms = [path for path in state if path.endswith("norm/scale") and "nu" not in path]
    assert all(state[path].dtype == jnp.float32 for path in norms)
    moved = float(jnp.linalg.norm((wanted["layers/mlp/up"] - 1).reshape(-1)))
    apart = float(jnp.linalg.norm((found["layers/mlp/up"] - wanted["layers/mlp/up"]).reshape(-1)))
    assert 0 < apart < (0.3 if kind == "lion" else 0.05) * moved  # Lion takes only the sign


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"kind": "adamw", "beta1": 0.99}, "adam/mu"),
        ({"kind": "lion", "beta2": 0.99}, "lion/mu"),
        ({"kind": "sgd", "momentum": 0.99}, "sgd/trace"),
        ({"kind": "muon", "momentum": 0.99}, "muon/mu"),
        ({"kind": "muon", "beta1": 0.99}, "muon/adam/mu"),
        ({"kind": "soap", "beta1": 0.99}, "soap/adam/mu"),
    ],
)
def test_moments_in_bfloat16_decay_by_the_rate_that_is_set(settings, part):
    """A product in bfloat16 would decay them by 0.98828125: the rate as bfloat16."""
    optimizer = make_optimizer(Optimizer(**settings, moment_dtype="bfloat16"), unflatten(SPECS))
    parameters = unflatten({path: jnp.ones(spec.shape) for path, spec in SPECS.items()})
    state = optimizer.init(parameters)
    moments = {
        path: jnp.linspace(0.5, 2.0, array.size).reshape(array.shape).astype(jnp.bfloat16)
        for path, array in flatten(pack(state)).items()
        if path.startswith(f"{part}/")
    }
    state = unpack(unflatten(flatten(pack(state)) | moments), state)
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    _, state = jax.jit(optimizer.update)(nothing, state, parameters, learning_rate=0.1)
    assert moments
    for path, before in moments.items():
        wanted = (0.99 * before.astype(jnp.float32)).astype(jnp.bfloat16)
        after = flatten(pack(state))[path]
        assert after.dtype == jnp.bfloat16 and (after == wanted).all(), path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kind": "sgd", "momentum": 0.0, "nesterov": True},
            "nesterov has no effect with momentum",
        ),
        ({"beta2": 0.99999999999}, "is 1 in float32"),
        ({"epsilon": 1e-60}, "1e-60 is 0 in float32"),
        ({"weight_decay": 1e60}, r"1e\+60 is infinite in float32"),
        ({"beta1": 0.999, "moment_dtype": "bfloat16"}, "beta1 = 0.999 loses at a step"),
        ({"kind": "lion", "beta2": 0.998, "moment_dtype": "int8"}, "at most 0.996"),
        ({"kind": "sgd", "momentum": 0.999, "moment_dtype": "bfloat16"}, "momentum = 0.999"),
        ({"kind": "lion", "epsilon": 1e-6}, 'epsilon is not a setting of kind = "lion"; it is one'),
        ({"momentum": 0.9}, 'momentum is not a setting of kind = "adamw"; it is one of "sgd", "mu'),
        ({"kind": "adafactor", "moment_dtype": "bfloat16"}, "moment_dtype is not a setting of"),
        ({"precondition_frequency": 5}, 'is not a setting of kind = "adamw"; it is one of "soap"'),
        ({"kind": "schedule_free", "beta1": 0.0}, "averages weights with beta1; raise it"),
        ({"kind": "schedule_free", "ema_decay": 0.9}, "remove ema_decay"),
        ({"kind": "muon", "custom": "a.py:make"}, 'custom takes the place of kind = "muon"'),
        ({"kind": "a.py:make"}, 'is set as custom = "a.py:make"; remove kind'),
    ],
)
def test_settings_that_a_kind_has_not_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Optimizer(**settings)


@pytest.mark.parametrize("kind", ["muon", "soap"])
def test_an_optimizer_of_matrices_without_a_named_one_is_refused(kind):
    specs = {
        "embedding": ArraySpec((8, 4), ("vocab", "embed")),
        "x": ArraySpec((3, 3), (None,) * 2),
    }
    with pytest.raises(ConfigError, match="the model has no matrix whose axes have names"):
        make_optimizer(Optimizer(kind=kind), specs)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("lambda p: (), lambda u, s, p=None: (jax.tree.map(jnp.sum, u), s)",
         "an update that it returns is a scalar for layers/mlp/up, and not 2x16x64"),
        ("lambda p: (), lambda u, s, p=None: ({}, s)", "an update that it returns lacks layers"),
        ("lambda p: jnp.zeros([], jnp.int32), lambda u, s, p=None: (u, s + 0.5)",
         "its state that it returns is a scalar of float32, and not a scalar of int32"),
        ("lambda p: {'n': jnp.zeros(2)}, lambda u, s, p=None: (u, {**s, 'm': s['n']})",
         "its state that it returns has, and did not have before, m"),
        ("lambda p: {'n': jnp.zeros((0, 2))}, lambda u, s, p=None: (u, s)",
         r"an array without elements \(n\), which a checkpoint cannot store"),
    ],
)  # fmt: skip
def test_what_an_optimizer_of_ones_own_returns_must_fit(tmp_path, made, words):
    """A scalar would be added to every element of a weight, and another dtype ends a run."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import jax, jax.numpy as jnp, optax\n"
        f"def make():\n    return optax.GradientTransformation({made})\n"
    )
    parameters = unflatten({path: jnp.ones(spec.shape) for path, spec in SPECS.items()})
    optimizer = make_optimizer(Optimizer(custom=f"{path}:make"), unflatten(SPECS))
    with pytest.raises(ConfigError, match=words):
        state = optimizer.init(parameters)
        optimizer.update(parameters, state, parameters, learning_rate=0.1)


def test_rows_and_columns_of_matrices_follow_from_the_names_of_axes():
    found = {path: matrix_axes(spec) for path, spec in flatten(parameter_specs(MIXTURE)).items()}
    attention = MatrixAxes(stack=(0,), rows=(1,), columns=(2, 3))
    assert found["layers/attention/query"] == found["layers/attention/value"] == attention
    assert found["layers/attention/output"] == MatrixAxes((0,), (1, 2), (3,))
    assert found["layers/mlp/down"] == MatrixAxes((0, 1), (2,), (3,))
    assert found["layers/attention/query_bias"] is None and found["final_norm/scale"] is None
    fused = flatten(
        parameter_specs(dataclasses.replace(GPT2, fused_gate_up=True, activation="swiglu"))
    )
    assert matrix_axes(fused["layers/mlp/gate_up"]) == MatrixAxes((0, 2), (1,), (3,))
    hidden = [
        path for path, spec in flatten(parameter_specs(MIXTURE)).items() if is_hidden_matrix(spec)
    ]
    assert not [path for path in hidden if not path.startswith("layers/") or "norm" in path]


def test_matrices_of_one_shape_are_moved_together_and_replicas_take_what_is_left():
    """8 devices for 4 matrices of two arrays; shards of columns are joined from the last axis."""
    specs = {name: ArraySpec((2, 8, 16), ("layers", "embed", "mlp")) for name in ("up", "gate")}
    rules = Rules({"embed": ("fsdp",), "mlp": ("tensor",)}, {})
    (group,) = group_matrices(specs, rules, MeshShape({"data": 2, "fsdp": 2, "tensor": 2}))
    assert list(group.axes) == ["up", "gate"] and group.shard_shape == (4, 8)
    assert group.moves == (Move("fsdp", 2, 1), Move("tensor", 2, 2)) and group.padded_count == 4
    (group,) = group_matrices(specs, rules, MeshShape({"data": 8, "tensor": 2}))
    assert group.moves == (Move("tensor", 2, 2), Move("data", 8, None))
    assert group.count == 4 and group.padded_count == 16


@pytest.mark.parametrize("kind", ["adamw", "lion", "adafactor"])
def test_constants_among_the_parameters_stay_bit_for_bit(kind):
    specs = {"bias": ArraySpec((4,), (None,), role="constant"), "w": ArraySpec((4,), ("embed",))}
    settings = Optimizer(kind=kind, weight_decay=0.5, decay_mask="all", ema_decay=0.9)
    optimizer = make_optimizer(settings, specs)
    parameters = {name: jnp.array([0.1, 1 / 3, -7.0, 1e-9]) for name in specs}
    gradients = {"bias": jnp.zeros(4), "w": jnp.ones(4)}
    update = jax.jit(optimizer.update)
    updates, state = update(gradients, optimizer.init(parameters), parameters, learning_rate=0.1)
    assert not updates["bias"].any()
    assert updates["w"].all()
    assert jnp.array_equal(flatten(pack(state))["ema/bias"], parameters["bias"])


def test_preconditioners_are_sharded_as_their_matrix_and_long_sides_have_none():
    spec = ArraySpec((2, 8, 4, 4), ("layers", "embed", "heads", "head_dim"))
    assert preconditioner_specs(spec, 16) == {
        "left": ArraySpec((2, 8, 8), ("layers", "embed", "heads")),
        "right": ArraySpec((2, 16, 16), ("layers", "embed", "heads")),
    }
    assert list(preconditioner_specs(spec, 8)) == ["left"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("trn2:4", "has no eigen- and QR decomposition"),
        ("ascend910b:8", "has no eigen- and QR decomposition"),
        ("v5e:2x2", "takes more than minutes for the eigen- and QR decomposition"),
    ],
)
def test_soap_is_refused_where_the_compiler_has_no_decompositions(target, words):
    batch = Batch(global_batch_size=8, seq_len=8)
    program = Program(model=GPT2, target=target, batch=batch, optimizer=Optimizer(kind="soap"))
    with pytest.raises(LoweringError, match=words):
        check_optimizer(resolve(program))
