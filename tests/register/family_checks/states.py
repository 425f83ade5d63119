"""Programs, states and batches of one family, which the checks share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from family_checks.tiny import VOCAB
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Optimizer, Program, TorchModel
from graphtrain.graphs.build import build_graph
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.parity import stack_weights
from lowering.trees import Tree, unflatten

RATE, DECAY = 1e-3, 5.0
OPTIMIZER = Optimizer(epsilon=1e-5, clip_norm=0.0, weight_decay=DECAY)
UNOPTIMIZED: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    UNOPTIMIZED["xla_cpu_use_fusion_emitters"] = False  # compiled in a fraction of the time
# Families whose gradients are NaN in the code that LLVM makes without optimization, and only there.
_OPTIMIZED = ("xlstm",)
ROWS, LENGTH = 4, 12


class Mismatch(Exception):
    """A result that is not that of PyTorch, of transformers, or of one device."""


def choose_optimization(family: str) -> None:
    """Set the compiler options of a family's programs, which its process makes from now on."""
    if family in _OPTIMIZED:
        UNOPTIMIZED["xla_backend_optimization_level"] = 1


def program(model: TorchModel, *, microbatches: int = 1, **settings: Any) -> Program:
    """Return the program of a family, on one device unless settings say otherwise."""
    batch = Batch(global_batch_size=ROWS, seq_len=LENGTH, microbatches=microbatches)
    given = {"target": "cpu:1", "mesh": Mesh()} | settings
    return Program(model=model, batch=batch, optimizer=OPTIMIZER, **given)


@cache
def train_step(model: TorchModel) -> Any:
    """Return the compiled train step on one device."""
    graph = build_graph(resolve(program(model)), "train")
    return jax.jit(graph.step, compiler_options=UNOPTIMIZED)


def new_state(parameters: Tree) -> Tree:
    """Return a state whose moments are zero."""
    zeros = jax.tree.map(np.zeros_like, parameters)
    moments = {"adam": {"count": np.int32(0), "mu": zeros, "nu": zeros}}
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    return {"parameters": parameters, "optimizer": moments, "step": np.int32(0), "key": key}


def module_parameters(opened: OpenedModel, module: torch.nn.Module) -> Tree:
    """Return a module's weights as the tree that a program stores."""
    return unflatten(stack_weights(opened, values(module)))


def batch(seed: int, microbatches: int = 1) -> dict[str, jax.Array]:
    """Return random tokens and their targets, (microbatches, rows, length)."""
    tokens = np.random.default_rng(seed).integers(2, VOCAB, (ROWS, LENGTH + 1), np.int32)
    tokens = tokens.reshape(microbatches, ROWS // microbatches, LENGTH + 1)
    return {
        "tokens": jnp.asarray(tokens[..., :-1]),
        "targets": jnp.asarray(tokens[..., 1:]),
        "weights": jnp.ones((*tokens.shape[:-1], LENGTH), jnp.float32),
    }


def values(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return copies of a module's weights by name."""
    return {name: one.detach().numpy().copy() for name, one in module.named_parameters()}


def largest_difference(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> tuple[str, float]:
    """Return the name of the array that differs most, and by how much; NaN differs most."""
    differences = {
        name: float(np.abs(np.asarray(found[name]) - array).max())
        for name, array in expected.items()
    }
    name = max(differences, key=lambda name: (np.isnan(differences[name]), differences[name]))
    return name, differences[name]
