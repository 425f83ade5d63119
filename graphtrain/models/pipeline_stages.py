"""The decoder as a pipeline: how its layers are stored for stages, and what each stage computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graphtrain.config.schema import Model
from graphtrain.models.block import apply_stack, full_layers, layer_keys, split_key
from graphtrain.models.decoder import Parameters, merge
from lowering.pipeline.schedules import Pipeline
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec
from sharding_rules.pipeline import Stages

# Of scores, targets and weights: what is minimised, and what to report.
Score = Callable[[jax.Array, Tree], tuple[jax.Array, Any]]
Keys = Callable[[jax.Array], jax.Array]  # of a microbatch's number: its dropout key


def arrange_rows(array: jax.Array, stages: Stages) -> jax.Array:
    """Store layers so that none ever moves: (rounds, stages x depth, ...), or without rounds if 1.

    The second axis is split over the stages. In that order of rows the layers follow one another,
    with rows of zeros where a chunk is short.
    """
    rows = [stages.rows.index(layer) for layer in range(sum(stages.layers))]
    if len(rows) < len(stages.rows):
        padded = jnp.zeros((len(stages.rows), *array.shape[1:]), array.dtype)
        array = padded.at[np.array(rows)].set(array)
    return array.reshape(*_leading(stages), *array.shape[1:])


def arrange_spec(spec: ArraySpec, stages: Stages) -> ArraySpec:
    """The ArraySpec of what arrange_rows returns."""
    leading = _leading(stages)
    names = ("rounds", "layers")[-len(leading) :]
    return replace(spec, shape=(*leading, *spec.shape[1:]), axes=(*names, *spec.axes[1:]))


def arrange(parameters: Parameters, stages: Stages) -> dict[str, Any]:
    """The decoder's parameters, its layers stored for stages."""
    layers = jax.tree.map(lambda array: arrange_rows(array, stages), parameters["layers"])
    return {**parameters, "layers": layers}


def arrange_specs(specs: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """ArraySpecs of what arrange returns."""
    return {**specs, "layers": jax.tree.map(lambda one: arrange_spec(one, stages), specs["layers"])}


def _leading(stages: Stages) -> tuple[int, ...]:
    rows = stages.stages * stages.depth
    return (stages.rounds, rows) if stages.rounds > 1 else (rows,)


def decoder_pipeline(
    model: Model, stages: Stages, score: Score, keys: Keys | None, term_weight: float
) -> Pipeline:
    """The decoder's parts on one microbatch; each layer drops what it would without a pipeline.

    Args:
        model: Settings.
        stages: The division of its layers.
        score: Of logits.
        keys: For dropout; without them nothing is dropped.
        term_weight: Of what the layers of one microbatch add to the loss.
    """

    def keys_of(number: jax.Array) -> tuple[Any, Any]:
        return split_key(None if keys is None else keys(number))

    def first(weights: Tree, microbatch: Tree, number: jax.Array) -> jax.Array:
        return merge(model, weights).embed(microbatch["tokens"], keys_of(number)[0])

    def stage(rows: Tree, x: jax.Array, number: jax.Array, chunk: jax.Array) -> tuple[Any, Any]:
        drop, full = layer_keys(model, keys_of(number)[1]), full_layers(model)
        begin = jnp.array(np.cumsum((0, *stages.layers[:-1])))[chunk]
        here = begin + jnp.arange(stages.depth)
        which = jnp.minimum(here, model.layers - 1)  # rows of zeros are no layer's
        count = jnp.array(stages.layers)[chunk]
        x, terms = apply_stack(
            model,
            merge(model, {"layers": rows}).layers,
            x,
            None if drop is None else drop[which],
            here < begin + count if stages.waste else None,
            None if full is None else full[which],
        )
        return x, jax.tree.map(lambda term: term * term_weight, terms)

    def last(weights: Tree, x: jax.Array, microbatch: Tree) -> tuple[jax.Array, Any]:
        decoder = merge(model, weights)
        return score(decoder.unembed(decoder.final_norm(x)), microbatch)

    return Pipeline(
        first,
        stage,
        last,
        rounds=stages.rounds,
        recompute=model.remat != "none",
        joint=model.mixture is not None,
    )


def divide_parameters(model: Model, parameters: Parameters) -> Tree:
    """Parameters as a Pipeline takes them; a tied head is in two places."""
    last = ("final_norm", "embedding") if model.tied_head else ("final_norm", "head")
    return {
        "first": {"embedding": parameters["embedding"]},
        "stages": parameters["layers"],
        "last": {name: parameters[name] for name in last},
    }


def join_gradients(gradients: Tree) -> Tree:
    """Gradients of the parameters that divide_parameters was given."""
    joined = {**gradients["last"], "layers": gradients["stages"]}
    embedding = gradients["first"]["embedding"]
    if "embedding" in joined:
        embedding = jax.tree.map(jnp.add, embedding, joined["embedding"])
    return {**joined, "embedding": embedding}


def split_batch(batch: Tree, stages: int, devices: int) -> Tree:
    """One microbatch as several, that stages may work at once; empty ones fill up their number.

    Args:
        batch: Arrays (sequences, seq); weights of 0 mask.
        stages: What the number of microbatches is a multiple of.
        devices: What the sequences of each are a multiple of.
    """
    sequences = len(batch["tokens"])
    parts = math.gcd(sequences // devices, stages) if sequences % devices == 0 else 1

    def split(array: jax.Array) -> jax.Array:
        array = array.reshape(parts, sequences // parts, *array.shape[1:])
        empty = jnp.zeros((-parts % stages, *array.shape[1:]), array.dtype)
        return jnp.concatenate([array, empty])

    return jax.tree.map(split, batch)
