"""Dtypes in which the targets can compute a model; imports no JAX."""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from lowering.errors import LoweringError


def check_compute_dtype(program: ResolvedProgram) -> None:
    """Refuse a dtype in which the target does not compute.

    Raises:
        LoweringError: says what to change.
    """
    if program.model.dtype == "float16" and program.target.platform == "tpu":
        raise LoweringError(
            f'program.precision.compute = "float16": {program.target} does not multiply in '
            'float16, and its kernels refuse it; set it to "bfloat16", which needs no loss scale'
        )
