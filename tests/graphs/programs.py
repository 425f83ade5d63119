"""Small programs that the tests of this folder compile and run."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from unoptimized import OPTIONS

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, Program
from graphtrain.graphs.build import accumulate_gradients, build_graph
from graphtrain.graphs.objectives import metric_names
from graphtrain.graphs.open_model import open_language_model
from lowering.graph import Graph
from lowering.lowered import Lowered
from lowering.machine.target import Target
from lowering.trees import Tree, flatten
from lowering.xla import backend as xla
from lowering.xla.executable import Executable
from sharding_rules.arrays import ArraySpec

LLAMA = Model(
    layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=64, dtype="float32", remat="none"
)
GPT2 = Model(
    layers=2,
    embed=32,
    heads=4,
    mlp=64,
    vocab=64,
    positions="learned",
    max_position_embeddings=16,
    norm="layer",
    activation="gelu_tanh",
    bias="all",
    tie_word_embeddings=True,
    dtype="float32",
)
GEMMA = dataclasses.replace(  # a window narrower than a chunk of the ring, and one layer without
    LLAMA,
    activation="geglu_tanh",
    tie_word_embeddings=True,
    post_norm=True,
    qk_norm=True,
    partial_rotary_factor=0.5,
    attention_sinks=True,
    rms_norm_offset=True,
    scaled_embedding=True,
    sliding_window=3,
    global_attention_every=2,
    sliding_window_rope_theta=1000.0,
    attn_logit_softcap=2.0,
    final_logit_softcap=5.0,
)
CUBE = {"target": "cpu:8", "mesh": Mesh(data=2, fsdp=2, tensor=2)}


def program(**settings: Any) -> Program:
    """A Llama of 2 layers on one device, unless settings say otherwise."""
    defaults = {"mesh": Mesh(), "model": LLAMA, "batch": Batch(global_batch_size=8, seq_len=16)}
    return Program(**defaults | settings)


@functools.cache
def loaded(
    of: Program, graph: str, optimized: bool = False, traced_for: Target | None = None
) -> Executable:
    """Lower, compile and load one graph, by the road that every program takes.

    Args:
        optimized: with the options of `graphtrain compile`; else in less time.
        traced_for: a target whose program it is to be; what suits a CPU rounds otherwise.
    """
    lowered = lower(of, graph, traced_for=traced_for)
    if not optimized:
        lowered = unoptimized(lowered)
    return xla.load(xla.compile(lowered), lowered.target)


def lower(of: Program, graph: str, backend: Any = xla, **options: Any) -> Lowered:
    """Lower one graph for the program's target."""
    made = resolve(of)
    built = gradients_graph(of) if graph == "gradients" else build_graph(made, graph)
    return backend.lower(built, made.rules, made.mesh, made.target, **options)


def unoptimized(lowered: Lowered) -> Lowered:
    """The same program, to be compiled in less time for a CPU and alike for other machines."""
    if lowered.target.platform != "cpu":
        return lowered
    return dataclasses.replace(lowered, options=lowered.options | OPTIONS)


def gradients_graph(of: Program) -> Graph:
    """The metrics and gradients that the training step of a program computes."""
    made = resolve(of)
    train = build_graph(made, "train")
    inputs = {name: spec for name, spec in train.inputs.items() if name != "learning_rate"}

    def gradients(state: Tree, *inputs: Tree) -> Tree:
        *frozen, batch = inputs
        grads, metrics = accumulate_gradients(made, state, batch, *frozen)
        return {"gradients": grads, **metrics}

    outputs = {
        "gradients": train.inputs["state"]["parameters"],
        **dict.fromkeys(metric_names(made), ArraySpec((), (), "float32", "activation")),
    }
    return Graph("gradients", gradients, inputs, outputs, runs_once=True)  # compiled quickly


def state_of(of: Program) -> Tree:
    """The state that seed 0 gives, on the host; the same for every mesh and batch."""
    plain = program(model=of.model, optimizer=of.optimizer, precision=of.precision)
    return stored(of, jax.device_get(loaded(plain, "init")(np.uint32(0))["state"]))


def alone(of: Program) -> Program:
    """The same on one device."""
    return dataclasses.replace(of, target="cpu:1", mesh=Mesh())


def stored(of: Program, tree: Tree) -> Tree:
    """Parameters, or what mirrors them, as a program stores them for its stages."""
    stages = resolve(of).stages
    if stages is None or not isinstance(tree, dict):
        return tree
    model = open_language_model(of.model)
    if tree.keys() == model.specs().keys():
        return jax.device_get(model.to_pipeline_layout(tree, stages))
    return {name: stored(of, part) for name, part in tree.items()}


def batch(of: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens; some targets are masked, and not as many in each microbatch."""
    sizes = of.batch
    random = np.random.default_rng(seed)
    shape = sizes.microbatches, sizes.global_batch_size // sizes.microbatches, sizes.seq_len
    tokens = random.integers(0, of.model.vocab_tokens, (*shape[:-1], sizes.seq_len + 1), np.int32)
    weights = (random.random(shape) < np.linspace(0.4, 1, shape[0])[:, None, None]) * 1.0
    made = {
        "tokens": tokens[..., :-1].copy(),
        "targets": tokens[..., 1:].copy(),
        "weights": weights.astype(np.float32),
    }
    if not sizes.cross_document_attention:
        made["documents"] = np.cumsum(random.random(shape) < 0.2, -1, np.int32)
    return made


def placed_inputs(executable: Executable, name: str, tree: Tree) -> Tree:
    """Host arrays where an argument of an executable lives."""
    return xla.to_devices(tree, executable.inputs(name))


def described(tree):
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding), tree
    )


def assert_same(got, want):
    for path, array in flatten(want).items():
        np.testing.assert_array_equal(flatten(got)[path], array, err_msg=path)
