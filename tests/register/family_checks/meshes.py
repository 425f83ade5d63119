"""One step on several devices, compared with one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from family_checks.states import (
    RATE,
    UNOPTIMIZED,
    Mismatch,
    batch,
    largest_difference,
    module_parameters,
    new_state,
    program,
    train_step,
)
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Mesh, PipelineSettings, TorchModel
from graphtrain.graphs.build import build_graph
from graphtrain.graphs.open_model import open_language_model
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import module_with_weights
from graphtrain.torch_frontend.staged_blocks import StagedBlocks
from lowering.trees import Tree, flatten
from lowering.xla import backend as xla
from sharding_rules.pipeline import divide_layers

LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4


def check_fsdp(model: TorchModel, folder: Path) -> str:
    """Compare fsdp = 2 with one device."""
    return _check(model, Mesh(fsdp=2), "cpu:2")


def check_tensor(model: TorchModel, folder: Path) -> str:
    """Compare data = 2 by tensor = 2 with one device."""
    return _check(model, Mesh(data=2, tensor=2), "cpu:4")


def check_stage(model: TorchModel, folder: Path) -> str:
    """Compare two pipeline stages with one device."""
    blocks = StagedBlocks.of(open_model(model)).stack
    # Configurations of some families do not say how many blocks are in a decoder.
    held = tuple(rows * blocks.period for rows in divide_layers(blocks.rows, 2).layers)
    pipeline = PipelineSettings(layers_per_stage=held)
    return _check(model, Mesh(stage=2), "cpu:2", microbatches=2, pipeline=pipeline)


def check_expert(model: TorchModel, folder: Path) -> str:
    """Compare expert = 2 with one device; a family without experts is not checked."""
    opened = open_model(model)
    if not any("experts" in spec.axes for spec in opened.specs().values()):
        return "no experts"
    return _check(model, Mesh(expert=2), "cpu:2")


def _check(model: TorchModel, mesh: Mesh, target: str, microbatches: int = 1, **others: Any) -> str:
    settings: Any = {"mesh": mesh, "target": target, "microbatches": microbatches} | others
    resolved = resolve(program(model, **settings))
    graph = build_graph(resolved, "train")
    lowered = xla.lower(graph, resolved.rules, resolved.mesh, resolved.target)
    lowered = replace(lowered, options=lowered.options | UNOPTIMIZED)
    executable = xla.load(xla.compile(lowered), lowered.target)

    def stored(parameters: Tree) -> Tree:
        if resolved.stages is None:
            return parameters
        layout = open_language_model(model).to_pipeline_layout(parameters, resolved.stages)
        return jax.device_get(layout)

    parameters = module_parameters(open_model(model), module_with_weights(model))
    expected = train_step(model)(new_state(parameters), batch(0), jnp.float32(RATE))
    inputs = {"state": new_state(stored(parameters)), "batch": batch(0, microbatches)}
    placed = [xla.to_devices(tree, executable.inputs(name)) for name, tree in inputs.items()]
    out = executable(*placed, np.float32(RATE))
    loss = abs(float(out["metrics"]["loss"]) - float(expected["metrics"]["loss"]))
    if not loss < LOSS_TOLERANCE:
        raise Mismatch(f"the loss differs by {loss:.1e}")
    name, difference = largest_difference(
        flatten(jax.device_get(out["state"]["parameters"])),
        flatten(stored(jax.device_get(expected["state"]["parameters"]))),
    )
    if not difference < WEIGHT_TOLERANCE:
        raise Mismatch(f"after the step {name} differs by {difference:.1e}")
    return f"loss {loss:.0e}, weights {difference:.0e}"
