"""Which attention a target has a kernel for; imports no JAX, so that estimates know too.

A kernel computes attention a block at a time and never has all scores in memory. What is here only
says whether there is one; `models.flash` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.config.schema import HowAttended, Model, Program
from lowering.errors import LoweringError
from lowering.machine.target import Target
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

_POSITIONS = ("attending", "attended")  # axes of them inside attention
BLOCK = 128  # positions; a kernel's blocks are multiples of it
_WIDEST = {"tpu": 256, "cuda": 128}  # heads whose blocks fit the memory beside the units
_NARROWEST = {"tpu": 64, "cuda": 16}  # heads are multiples of it


@dataclass(frozen=True)
class Asked:
    """What a model wants of attention; the same for all its layers."""

    dtype: str
    length: int
    head_dim: int
    window: bool = False  # a key is out of sight from a distance on
    window_varies: bool = False  # in some layers and not in others
    cap: bool = False  # scores are bent to stay below a limit
    slopes: bool = False  # scores fall with distance, as ALiBi's
    split_positions: bool = False  # a device has a part of the positions: a ring
    each_copy: bool = False  # copies of the model are differentiated one by one

    @classmethod
    def of(
        cls, model: Model, length: int, *, split_positions: bool = False, each_copy: bool = False
    ) -> Asked:
        """By a decoder, of sequences of a length."""
        assert model.head_dim
        return cls(
            dtype=model.dtype,
            length=length,
            head_dim=model.head_dim,
            window=model.window is not None,
            window_varies=model.full_every is not None,
            cap=model.score_cap is not None,
            slopes=model.positions == "alibi",
            split_positions=split_positions,
            each_copy=each_copy,
        )


def in_step(program: Program, rules: Rules, mesh: MeshShape) -> bool:
    """Whether a program's training step has the kernel.

    Raises:
        LoweringError: as takes_kernel.
    """
    split = any(mesh.size(rules.activations.get(axis, ())) > 1 for axis in _POSITIONS)
    batch, copies = program.batch, mesh.axes.get("data", 1)
    each_copy = batch.reduce == "last" and copies > 1
    asked = Asked.of(program.model, batch.length, split_positions=split, each_copy=each_copy)
    return takes_kernel(program.model.attention, asked, Target.parse(program.target))


def takes_kernel(how: HowAttended, asked: Asked, target: Target) -> bool:
    """Whether attention is computed by the target's kernel.

    Raises:
        LoweringError: it has to be, and there is none; with the reason.
    """
    if how == "scores":
        return False
    reason = obstacle(asked, target)
    if reason and how == "flash":
        raise LoweringError(
            f'program.model.attention = "flash": {reason}; set it to "auto" or "scores"'
        )
    return not reason


def obstacle(asked: Asked, target: Target) -> str:
    """Why the target's kernel does not compute this; empty if it does."""
    platform = target.platform
    if platform not in _WIDEST:
        return f"{target} has no kernel for it, only TPUs and NVIDIA's cards have"
    if asked.split_positions:
        return "the rules split positions inside attention, and a ring has blocks of its own"
    if asked.each_copy:
        return 'kernels cannot be told from copy to copy, as batch.reduce = "last" has to'
    if asked.dtype != "bfloat16":
        return f"kernels round products to bfloat16, and program.model.dtype is {asked.dtype}"
    if asked.slopes:
        return "kernels have no slopes of ALiBi"
    if asked.window_varies:
        return "kernels have one window for all layers, and full_every makes two kinds of them"
    if platform == "cuda" and (asked.window or asked.cap):
        return f"the kernel of {target} has no {'window' if asked.window else 'cap of scores'}"
    return _shape_obstacle(asked, target)


def _shape_obstacle(asked: Asked, target: Target) -> str:
    multiple, widest = _NARROWEST[target.platform], _WIDEST[target.platform]
    if asked.head_dim % multiple or asked.head_dim > widest:
        return (
            f"the kernel of {target} takes heads of a multiple of {multiple} up to {widest}, and "
            f"head_dim is {asked.head_dim}"
        )
    if asked.length % BLOCK:
        return f"kernels take sequences of a multiple of {BLOCK} positions, not {asked.length}"
    return ""
