"""Optimizers that a target's compiler can compute; imports no JAX."""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from lowering.errors import LoweringError

_WITHOUT_DECOMPOSITIONS = ("neuron", "ascend")  # platforms
# XLA for TPUs expands both decompositions: the program of a model of 4 layers and embed = 512 had
# not been compiled for v5e:2x4 after 5 minutes.
_SLOW_DECOMPOSITIONS = ("tpu",)


def check_optimizer(program: ResolvedProgram) -> None:
    """Refuse SOAP where the compiler has no eigen- and QR decomposition, or does not end with them.

    Raises:
        LoweringError: says what to change.
    """
    if program.optimizer.kind != "soap":
        return
    if program.target.platform in _SLOW_DECOMPOSITIONS:
        raise LoweringError(
            f'program.optimizer.kind = "soap": the compiler of {program.target} takes more than '
            "minutes for the eigen- and QR decomposition, with which bases are computed, even of "
            'small matrices; set it to "muon" or "adamw", or use a target of GPUs or CPUs'
        )
    if program.target.platform in _WITHOUT_DECOMPOSITIONS:
        raise LoweringError(
            f'program.optimizer.kind = "soap": the compiler of {program.target} has no eigen- and '
            'QR decomposition, with which bases are computed; set it to "muon" or "adamw"'
        )
