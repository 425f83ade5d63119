"""Number of parameters of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.models.flops import parameter_count
from graphtrain.models.lora.trainable import weight_count
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import Plan


@dataclass(frozen=True)
class ParameterCount:
    """Number of a model's parameters."""

    trained: int
    frozen: int = 0  # without gradients and optimizer state

    def __str__(self) -> str:
        if not self.frozen:
            return f"{self.trained:,} parameters"
        return (
            f"{self.trained + self.frozen:,} parameters: {self.trained:,} are trained, "
            f"{self.frozen:,} are frozen, without gradients or optimizer state"
        )


def count_parameters(program: ResolvedProgram, plan: Plan) -> ParameterCount:
    """Count the parameters of a program with this plan."""
    return _count(program, {path: layout.spec for path, layout in plan.layouts.items()})


def count_compiled_parameters(
    program: ResolvedProgram, record: Mapping[str, Any]
) -> ParameterCount:
    """Count the parameters of a program from the record of its compiled training step."""
    inputs = record["inputs"].items()
    return _count(
        program,
        {
            path: ArraySpec(tuple(fact["shape"]), (None,) * len(fact["shape"]), fact["dtype"])
            for path, fact in inputs
        },
    )


def _count(program: ResolvedProgram, arrays: Mapping[str, ArraySpec]) -> ParameterCount:
    trained, frozen = (
        weight_count({path: spec for path, spec in arrays.items() if path.startswith(start)})
        for start in ("state/parameters/", "frozen/")
    )
    if not frozen and not is_imported(program.model):
        return ParameterCount(parameter_count(program.model))  # without rows that pad a stage
    return ParameterCount(trained, frozen)
