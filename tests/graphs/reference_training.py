"""Training of a Llama by PyTorch in float64: optimizers of torch, else the formulas of authors."""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from programs import LLAMA, batch, program, state_of
from test_preferences import in_torch

from graphtrain.config.schema import Batch, Optimizer
from graphtrain.weights.families import family_of_config
from graphtrain.weights.families.family import to_decoder
from lowering.trees import flatten

Weights = list[torch.nn.Parameter]
DECAY = 0.1  # of matrices, the embedding and the head
BETAS = (0.9, 0.95)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2."""

    def __init__(self, weights: Weights, weight_decay: float) -> None:
        super().__init__(weights, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                direction = torch.sign(BETAS[0] * momentum + (1 - BETAS[0]) * weight.grad)
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                momentum.lerp_(weight.grad, 1 - BETAS[1])


class ScheduleFree(torch.optim.Optimizer):
    """AdamWScheduleFree of facebookresearch/schedule_free, at one learning rate.

    Weights are y, at which gradients are taken, until `finish` makes them x, which is evaluated.
    """

    def __init__(self, weights: Weights, weight_decay: float) -> None:
        super().__init__(weights, {"lr": 0.0, "weight_decay": weight_decay})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        share = 1 / self.steps
        for group in self.param_groups:
            for y in group["params"]:
                state = self.state[y]
                z = state.setdefault("z", y.clone())
                squares = state.setdefault("squares", torch.zeros_like(y))
                squares.lerp_(y.grad**2, 1 - BETAS[1])
                root = (squares / (1 - BETAS[1] ** self.steps)).sqrt() + 1e-8
                direction = y.grad / root + group["weight_decay"] * y
                y.lerp_(z, share)
                y += group["lr"] * (BETAS[0] * (1 - share) - 1) * direction
                z -= group["lr"] * direction

    @torch.no_grad()
    def finish(self) -> None:
        for group in self.param_groups:
            for y in group["params"]:
                y.copy_((y - (1 - BETAS[0]) * self.state[y]["z"]) / BETAS[0])


class DecoupledSgd(torch.optim.SGD):
    """SGD with momentum, whose decay is no part of it."""

    def __init__(self, weights: Weights, weight_decay: float) -> None:
        super().__init__(weights, lr=0.0, momentum=0.9)
        self.decay = weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                weight *= 1 - group["lr"] * self.decay
        return super().step(closure)


def optimizers(kind: str, hidden: Weights, others: Weights) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a kind: of hidden matrices, of other weights, and of vectors."""
    tables, vectors = ([one for one in others if (one.ndim > 1) == is_table] for is_table in (1, 0))

    def adamw(weights: Weights, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, betas=BETAS, weight_decay=weight_decay)

    def muon(weights: Weights, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.Muon(weights, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    make = {
        "adamw": adamw,
        "muon": adamw,
        "lion": Lion,
        "sgd": DecoupledSgd,
        "schedule_free": ScheduleFree,
        "adafactor": functools.partial(torch.optim.Adafactor, eps=(1e-30, 1e-3)),
    }[kind]
    of_hidden = muon if kind == "muon" else make
    return [
        of_hidden(hidden, weight_decay=DECAY),
        make(tables, weight_decay=DECAY),
        make(vectors, weight_decay=0.0),
    ]


@functools.cache
def trained(kind: str, sizes: Batch, rate: float, steps: int) -> dict[str, np.ndarray]:
    """Return the weights of the Llama of `programs` after steps from seed 0, by path."""
    of = program(optimizer=Optimizer(), batch=sizes)
    module = in_torch(flatten(state_of(of)["parameters"]))
    named = dict(module.named_parameters())
    hidden = [one for name, one in named.items() if one.ndim == 2 and ".layers." in name]
    others = [one for one in named.values() if not any(one is each for each in hidden)]
    made = optimizers(kind, hidden, others)
    for step in range(steps):
        module.zero_grad()
        loss(module, batch(of, step)).backward()
        clip(named.values())
        for one in made:
            for group in one.param_groups:
                group["lr"] = rate
            one.step()
    for one in made:
        if isinstance(one, ScheduleFree):
            one.finish()
    return as_arrays({name: one.detach().numpy() for name, one in named.items()})


def loss(module: torch.nn.Module, inputs: dict[str, np.ndarray]) -> torch.Tensor:
    """Return the mean cross-entropy of all microbatches; each target weighs the same."""
    flat = {name: array.reshape(-1, array.shape[-1]) for name, array in inputs.items()}
    logits = module(torch.tensor(flat["tokens"]).long()).logits
    targets, weights = torch.tensor(flat["targets"]).long(), torch.tensor(flat["weights"]).double()
    losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def clip(weights: Iterable[torch.nn.Parameter]) -> None:
    """Scale all gradients to a global norm of at most 1."""
    gradients = [one.grad for one in weights if one.grad is not None]
    norm = torch.sqrt(torch.stack([(one**2).sum() for one in gradients]).sum())
    for one in gradients:
        one /= norm.clamp(min=1.0)


def as_arrays(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors of Hugging Face as the decoder's arrays."""
    layers: dict[str, list[np.ndarray]] = {}
    for piece in family_of_config({"model_type": "llama"}).weights(LLAMA):
        arrays = to_decoder(piece, [named[name] for name in piece.names], LLAMA)
        for path, array in zip(piece.row.paths, arrays, strict=True):
            layers.setdefault(path, []).append(array)
    return {
        path: np.stack(arrays) if path.startswith("layers/") else arrays[0]
        for path, arrays in layers.items()
    }
