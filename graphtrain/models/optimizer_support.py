"""Optimizers that a target's compiler can compute; imports no JAX."""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from lowering.errors import LoweringError

_WITHOUT_DECOMPOSITIONS = ("neuron", "ascend")  # platforms


def check_optimizer(program: ResolvedProgram) -> None:
    """Refuse SOAP where the compiler has no eigendecomposition and no QR decomposition.

    Raises:
        LoweringError: says what to change.
    """
    if program.optimizer.kind == "soap" and program.target.platform in _WITHOUT_DECOMPOSITIONS:
        raise LoweringError(
            f'program.optimizer.kind = "soap": the compiler of {program.target} has no eigen- and '
            'QR decomposition, with which bases are computed; set it to "muon" or "adamw"'
        )
