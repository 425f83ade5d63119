"""Check one family of transformers; prints one line of JSON for each check.

    python tests/register/family.py FAMILY FOLDER [CHECK ...]

Checks: trace, training, weights, fsdp. FOLDER keeps the small configuration and its weights.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tiny import VOCAB, tiny_config

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Optimizer, Program, TorchModel
from graphtrain.graphs.build import build_graph
from graphtrain.torch_frontend.model import OpenedModel, factory, open_model
from graphtrain.torch_frontend.parity import module_with_weights, stack_weights, unstack_weights
from lowering.trees import Tree, flatten, unflatten
from lowering.xla import backend as xla

STEPS, RATE, DECAY = 5, 1e-3, 5.0
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4
_ROWS, _LENGTH = 4, 12
_OPTIONS = {"xla_backend_optimization_level": 0}
_OPTIMIZER = Optimizer(epsilon=1e-5, clip_norm=0.0, weight_decay=DECAY)


class Mismatch(Exception):
    """A result that is not that of PyTorch or of transformers."""


def main(family: str, folder: Path, checks: list[str]) -> None:
    """Run the checks in order; a family that cannot be traced gets no others."""
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_default_matmul_precision", "highest")
    known: dict[str, Callable[[TorchModel, Path], str]] = {
        "trace": _trace,
        "training": _training,
        "weights": _weights,
        "fsdp": _fsdp,
    }
    try:
        (folder / "config.json").write_text(tiny_config(family))
    except Exception as error:
        _say("trace", False, f"no small configuration: {_short(error)}")
        return
    model = TorchModel(hf=str(folder), vocab=VOCAB, dtype="float32", remat="none")
    for check in checks or list(known):
        try:
            _say(check, True, known[check](model, folder))
        except Exception as error:
            _say(check, False, _short(error))
            if check == "trace":
                return


def _say(check: str, passed: bool, words: str) -> None:
    print(json.dumps({"check": check, "passed": passed, "words": words}), flush=True)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    # Lines of the model, without the place where transformers is installed.
    for part in text.split():
        if "/site-packages/" in part:
            text = text.replace(part, part.rpartition("/site-packages/")[2])
    return text[:300]


def _trace(model: TorchModel, folder: Path) -> str:
    """Trace the module, and its initial values."""
    opened = open_model(model)
    jax.eval_shape(opened.initialize, jax.random.key(0))
    return opened.strict and "strict front end"


def _training(model: TorchModel, folder: Path) -> str:
    """Compare five steps of AdamW with eager PyTorch."""
    opened, module = open_model(model), module_with_weights(model)
    optimizer = _reference_optimizer(module)
    step, state = _train_step(_program(model)), _state(opened, module)
    worst = 0.0
    for seed in range(STEPS):
        batch = _batch(seed)
        out = step(state, batch, jnp.float32(RATE))
        state, loss = out["state"], float(out["metrics"]["loss"])
        expected = _eager_step(module, optimizer, batch)
        difference = abs(loss - expected) / abs(expected)
        worst = max(worst, difference)
        if not difference < LOSS_TOLERANCE:  # nor if it is NaN
            raise Mismatch(f"step {seed + 1}: loss {loss:.6f} instead of {expected:.6f}")
    found = unstack_weights(opened, flatten(jax.device_get(state["parameters"])))
    name, difference = _largest_difference(found, _values(module))
    if not difference < WEIGHT_TOLERANCE:
        raise Mismatch(f"after {STEPS} steps {name} differs by {difference:.1e}")
    return f"loss {worst:.0e}, weights {difference:.0e}"


def _reference_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices: weights of products and embeddings, by their modules."""
    decayed, others = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (decayed if _is_decayed(module, name, parameter) else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    chosen = _OPTIMIZER
    return torch.optim.AdamW(groups, RATE, (chosen.beta1, chosen.beta2), chosen.epsilon)


def _is_decayed(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> bool:
    owner, _, last = name.rpartition(".")
    matrices = torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d
    inner = module.get_submodule(owner)
    if isinstance(inner, matrices) or type(inner).__name__ == "Conv1D":
        return last == "weight"
    is_matrix = sum(size > 1 for size in parameter.shape) > 1
    return is_matrix and not last.endswith("bias") and last != "A_log"  # as in Mamba


def _eager_step(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, jax.Array]
) -> float:
    tokens = torch.tensor(np.asarray(batch["tokens"])[0], dtype=torch.long)
    targets = torch.tensor(np.asarray(batch["targets"])[0], dtype=torch.long)
    logits = module(input_ids=tokens, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _weights(model: TorchModel, folder: Path) -> str:
    """Read a folder of save_pretrained, write it again; all tensors equal bit for bit."""
    from safetensors.numpy import load_file

    from graphtrain.weights.published import SavedTensors
    from graphtrain.weights.torch_modules import HuggingFaceWeights, stored_buffers

    opened, module = open_model(model), factory(model)()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    expected = stack_weights(opened, _values(module))
    described = {path: SimpleNamespace(shape=array.shape) for path, array in expected.items()}

    def fill(tree: Tree, read: Any) -> Tree:
        arrays = {path: one.shape for path, one in flatten(tree).items()}
        everything = slice(None)
        return unflatten(
            {path: read(path, shape, (everything,) * len(shape)) for path, shape in arrays.items()}
        )

    source = HuggingFaceWeights(folder, model)
    found = flatten(source.parameters(unflatten(described), fill))
    for path, array in expected.items():
        if not np.array_equal(found[path], array):
            raise Mismatch(f"{path} is not what the folder contains")
    saved = load_file(folder / "model.safetensors")
    arrays = unstack_weights(opened, found) | stored_buffers(opened.meta)
    tensors = SavedTensors(opened.meta.module, {name: one.shape for name, one in arrays.items()})
    written: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        written |= dict(tensors.add(name, array))
    _compare_folders(written, saved)
    return f"{len(saved)} tensors"


def _compare_folders(written: Mapping[str, np.ndarray], saved: Mapping[str, np.ndarray]) -> None:
    if different := written.keys() ^ saved.keys():
        name = sorted(different)[0]
        where = "exported" if name in written else "saved by transformers"
        raise Mismatch(f"{name} and {len(different) - 1} others are only {where}")
    for name, array in saved.items():
        if not np.array_equal(written[name], array):
            raise Mismatch(f"{name} is exported with other values")


def _fsdp(model: TorchModel, folder: Path) -> str:
    """Compare one step on a mesh of fsdp = 2 with one device."""
    opened, module = open_model(model), module_with_weights(model)
    batch, state = _batch(0), _state(opened, module)
    expected = _train_step(_program(model))(state, batch, jnp.float32(RATE))
    program = resolve(_program(model, mesh=Mesh(fsdp=2), target="cpu:2"))
    graph = build_graph(program, "train")
    lowered = xla.lower(graph, program.rules, program.mesh, program.target)
    lowered = replace(lowered, options=lowered.options | _OPTIONS)
    executable = xla.load(xla.compile(lowered), lowered.target)
    placed = [
        xla.to_devices(tree, executable.inputs(name))
        for name, tree in (("state", state), ("batch", batch))
    ]
    out = executable(*placed, np.float32(RATE))
    difference = abs(float(out["metrics"]["loss"]) - float(expected["metrics"]["loss"]))
    if not difference < 1e-5:
        raise Mismatch(f"the loss differs by {difference:.1e}")
    return f"loss {difference:.0e}"


def _program(model: TorchModel, **settings: Any) -> Program:
    batch = Batch(global_batch_size=_ROWS, seq_len=_LENGTH)
    given = {"target": "cpu:1", "mesh": Mesh(), "rules": ("fsdp",)} | settings
    return Program(model=model, batch=batch, optimizer=_OPTIMIZER, **given)


def _train_step(program: Program) -> Any:
    graph = build_graph(resolve(program), "train")
    return jax.jit(graph.step, compiler_options=_OPTIONS)


def _state(opened: OpenedModel, module: torch.nn.Module) -> Tree:
    tree = unflatten(stack_weights(opened, _values(module)))
    zeros = jax.tree.map(np.zeros_like, tree)
    moments = {"adam": {"count": np.int32(0), "mu": zeros, "nu": zeros}}
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    return {"parameters": tree, "optimizer": moments, "step": np.int32(0), "key": key}


def _batch(seed: int) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(seed).integers(2, VOCAB, (1, _ROWS, _LENGTH + 1), np.int32)
    return {
        "tokens": jnp.asarray(tokens[..., :-1]),
        "targets": jnp.asarray(tokens[..., 1:]),
        "weights": jnp.ones((1, _ROWS, _LENGTH), jnp.float32),
    }


def _values(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: one.detach().numpy().copy() for name, one in module.named_parameters()}


def _largest_difference(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> tuple[str, float]:
    differences = {
        name: float(np.abs(found[name] - array).max()) for name, array in expected.items()
    }
    name = max(differences, key=lambda name: differences[name])
    return name, differences[name]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
