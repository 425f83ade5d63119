"""init, train and evaluate as pure functions: the Graphs of a program.

A state is {"parameters", "optimizer", "step", "key"}, all named arrays. What changes often but not
the code, such as the learning rate, is an input.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.architecture import drops, forward, initialise, logits, parameter_specs
from graphtrain.config.schema import Program
from graphtrain.deferred import Objective, can_defer, key_here, reduce_last
from graphtrain.loss import cross_entropy
from graphtrain.models.documents import apart
from graphtrain.models.order import order_batch
from graphtrain.models.stages import arrange, arrange_specs
from graphtrain.optimizer import make_optimizer, moment_specs, pack, unpack
from graphtrain.pipelined import pipelined_gradients, pipelined_loss
from graphtrain.requests import stages_of
from lowering.constrain import constrain_tree, fetch
from lowering.graph import Graph
from lowering.target import Target
from lowering.trees import Tree, flatten
from sharding_rules.arrays import ArraySpec, Role

_SCALAR = ArraySpec((), (), "float32", "activation")


def build_graph(program: Program, name: str) -> Graph:
    """One of the graphs that `requests.graph_names` lists."""
    return {"init": _init, "train": _train, "evaluate": _evaluate}[name](program)


def _init(program: Program) -> Graph:
    stages = stages_of(program)

    def init(seed: jax.Array) -> Tree:
        weights_key, dropout_key = jax.random.split(jax.random.key(seed, impl=_bits(program)))
        parameters = initialise(program.model, weights_key)
        if stages is not None:
            parameters = arrange(parameters, stages)
        return {
            "state": {
                "parameters": parameters,
                "optimizer": pack(_optimizer(program).init(parameters)),
                "step": jnp.zeros((), jnp.int32),
                "key": jax.random.key_data(dropout_key),
            }
        }

    seed = ArraySpec((), (), "uint32", "activation")
    outputs = {"state": state_specs_of(program)}
    return Graph("init", init, {"seed": seed}, outputs, runs_once=True)


def _train(program: Program) -> Graph:
    optimizer = _optimizer(program)
    specs = parameter_specs_of(program)
    template = jax.eval_shape(optimizer.init, _shapes(specs))
    state_specs = state_specs_of(program)

    def train(state: Tree, batch: Tree, learning_rate: jax.Array) -> Tree:
        gradients, loss = accumulate_gradients(program, state, batch)
        # The update happens where the optimizer's state rests; only its result goes further.
        gradients = constrain_tree(gradients, specs, "optimizer")
        parameters = constrain_tree(state["parameters"], specs, "optimizer")
        moments = fetch(state["optimizer"], state_specs["optimizer"])
        updates, optimizer_state = optimizer.update(
            gradients, unpack(moments, template), parameters
        )
        scaled = jax.tree.map(lambda update: -learning_rate * update, updates)
        return {
            "state": {
                "parameters": optax.apply_updates(parameters, scaled),
                "optimizer": pack(optimizer_state),
                "step": state["step"] + 1,
                "key": state["key"],
            },
            "metrics": {
                "loss": loss,
                "grad_norm": optax.tree.norm(gradients),
                "targets": batch["weights"].sum(),
            },
        }

    return Graph(
        "train",
        train,
        {"state": state_specs, "batch": _batch(program, train=True), "learning_rate": _SCALAR},
        {
            "state": state_specs,
            "metrics": dict.fromkeys(("loss", "grad_norm", "targets"), _SCALAR),
        },
        donated=("state",),
    )


def accumulate_gradients(program: Program, state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    """Gradients and loss of all microbatches, each target weighing the same."""
    batch = order_batch(batch)
    microbatches = program.batch.microbatches
    parameters, specs = state["parameters"], parameter_specs_of(program)
    if (stages := stages_of(program)) is not None:
        gradients, loss = pipelined_gradients(
            program, stages, state, batch, _step_key(program, state)
        )
        return constrain_tree(gradients, specs, "optimizer"), loss
    objective = _objective(program, state, jnp.maximum(batch["weights"].sum(), 1.0))
    if program.batch.reduce == "last" and can_defer():
        return reduce_last(objective, parameters, specs, batch, microbatches)
    # A single gradient goes straight to where it is used; sums rest where the rules want them.
    role: Role = "optimizer" if microbatches == 1 else "gradient"

    def of(microbatch: Tree, index: Any) -> tuple[Tree, jax.Array]:
        differentiate = jax.value_and_grad(objective, has_aux=True)
        (_, loss), gradients = differentiate(parameters, microbatch, index)
        return constrain_tree(gradients, specs, role), loss

    if microbatches == 1:
        return of(jax.tree.map(lambda array: array[0], batch), 0)

    def add(sums: Any, indexed: tuple[Tree, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, of(*indexed)), None

    zeros = constrain_tree(jax.tree.map(jnp.zeros_like, parameters), specs, role)
    sums, _ = jax.lax.scan(add, (zeros, jnp.zeros(())), (batch, jnp.arange(microbatches)))
    return sums


def _objective(program: Program, state: Tree, targets: jax.Array) -> Objective:
    """What training minimises, of one microbatch; the sum over microbatches is that of a step."""
    key = _step_key(program, state)

    def objective(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, jax.Array]:
        dropout = key_here(jax.random.fold_in(key, index)) if drops(program.model) else None
        with apart(microbatch.get("documents")):
            out, auxiliary = forward(
                program.model, parameters, microbatch["tokens"], dropout_key=dropout
            )
        loss, squares = cross_entropy(out, microbatch["targets"], microbatch["weights"])
        added = sum(auxiliary.values()) / program.batch.microbatches
        return (loss + program.loss.z_loss * squares) / targets + added, loss / targets

    return objective


def _step_key(program: Program, state: Tree) -> jax.Array:
    key = jax.random.wrap_key_data(state["key"], impl=_bits(program))
    return jax.random.fold_in(key, state["step"])


def _bits(program: Program) -> str | None:
    """How random bits are made: as JAX is set, unless the target cannot make them so."""
    return Target.parse(program.target).random_bits


def _evaluate(program: Program) -> Graph:
    stages = stages_of(program)

    def loss_of(parameters: Tree, batch: Tree) -> jax.Array:
        batch = order_batch(batch)
        if stages is not None:
            return pipelined_loss(program, stages, parameters, batch)
        with apart(batch.get("documents")):
            out = logits(program.model, parameters, batch["tokens"])
        return cross_entropy(out, batch["targets"], batch["weights"])[0]

    def evaluate(parameters: Tree, batch: Tree) -> Tree:
        loss = loss_of(parameters, batch)
        return {"metrics": {"loss_sum": loss, "targets": batch["weights"].sum()}}

    return Graph(
        "evaluate",
        evaluate,
        {"parameters": parameter_specs_of(program), "batch": _batch(program, train=False)},
        {"metrics": {"loss_sum": _SCALAR, "targets": _SCALAR}},
    )


def parameter_specs_of(program: Program) -> Tree:
    """The parameters as a run stores them."""
    specs, stages = parameter_specs(program.model), stages_of(program)
    return specs if stages is None else arrange_specs(specs, stages)


def state_specs_of(program: Program) -> Tree:
    """What the state of a run holds."""
    parameters = parameter_specs_of(program)
    template = jax.eval_shape(_optimizer(program).init, _shapes(parameters))
    return {
        "parameters": parameters,
        "optimizer": moment_specs(template, flatten(parameters), program.optimizer.offload),
        "step": ArraySpec((), (), "int32", "optimizer"),
        "key": ArraySpec(_key_shape(program), (None,), "uint32", "optimizer"),
    }


def _key_shape(program: Program) -> tuple[int, ...]:
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=_bits(program))))
    return key.shape


def _optimizer(program: Program) -> optax.GradientTransformation:
    return make_optimizer(program.optimizer, parameter_specs_of(program))


def _shapes(specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)


def _batch(program: Program, *, train: bool) -> Tree:
    """A training batch has its microbatches in front; evaluation takes one microbatch."""
    batch = program.batch
    shape: tuple[int, ...] = (batch.sequences // batch.microbatches, batch.length)
    axes: tuple[str, ...] = ("batch", "seq")
    if train:
        shape, axes = (batch.microbatches, *shape), ("microbatch", *axes)
    dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    if batch.documents == "apart":
        dtypes["documents"] = "int32"
    return {name: ArraySpec(shape, axes, dtype, "activation") for name, dtype in dtypes.items()}
