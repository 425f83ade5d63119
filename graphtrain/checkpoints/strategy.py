"""Strategy file: the shardings of a program's arrays, without compiling the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from graphtrain.config.resolve import ResolvedProgram, layer_rows
from graphtrain.config.schema import Program
from graphtrain.errors import PlanError
from graphtrain.files import first_problem
from sharding_rules import documents

_FORMAT = 1


@dataclass(frozen=True)
class Strategy:
    """The settings of a program, and its state by path as in "parameters/head"."""

    settings: Program
    rows: tuple[int | None, ...]  # layer in each row of stacked arrays; None: padding
    arrays: dict[
        str, dict[str, Any]
    ]  # shape, axes, dtype, memory and split: mesh axes by dimension


def strategy_of(program: ResolvedProgram) -> Strategy:
    """Return the strategy of a program. This traces it, which takes seconds.

    Raises:
        PlanError: the model is imported from PyTorch.
        ShardingError: the rules cannot split an array.
    """
    from graphtrain.graphs.plan import plan_program

    rows, plan = layer_rows(program), plan_program(program)
    arrays = {}
    for path, layout in plan.layouts.items():
        if path.startswith("state/"):
            spec = layout.spec
            arrays[path.removeprefix("state/")] = {
                "shape": list(spec.shape),
                "axes": list(spec.axes),
                "dtype": spec.dtype,
                "memory": spec.memory,
                "split": [list(names) for names in layout.split],
                "shard": list(plan.shard_shape(path)),
            }
    return Strategy(program.settings, rows, arrays)


def write_json(path: Path, program: ResolvedProgram) -> None:
    """Write a strategy as JSON, for `graphtrain convert reshard` and for other programs."""
    strategy = strategy_of(program)
    contents = {
        "graphtrain_strategy": _FORMAT,
        "mesh": dict(program.mesh.axes),
        "rows": strategy.rows,
        "arrays": strategy.arrays,
        "program": asdict(program.settings),
    }
    path.write_text(_lines(contents) + "\n", encoding="utf-8")


def _lines(contents: dict[str, Any]) -> str:
    """Format JSON with one line for each array and each other entry."""
    arrays = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in contents["arrays"].items()
    )
    entries = (
        f" {json.dumps(name)}: " + (f"{{\n{arrays}\n }}" if name == "arrays" else json.dumps(value))
        for name, value in contents.items()
    )
    return "{\n" + ",\n".join(entries) + "\n}"


def read_json(path: Path) -> Strategy:
    """Read a strategy file written by write_json.

    Raises:
        PlanError: the file does not exist or is not a strategy.
    """
    if not path.is_file():
        raise PlanError(f"{path}: file not found; {_remedy(path)}")
    try:
        contents = documents.read_json(path)
        if contents["graphtrain_strategy"] != _FORMAT:
            raise ValueError(f"format {contents['graphtrain_strategy']} is not {_FORMAT}")
        program = TypeAdapter(Program).validate_json(json.dumps(contents["program"]))
        arrays = {name: dict(array) for name, array in contents["arrays"].items()}
        return Strategy(program, tuple(contents["rows"]), arrays)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise PlanError(f"{path} is not a strategy file ({reason}); {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    return f"create it with: graphtrain plan CONFIG --save-strategy {path}"


def _write_ckpt(path: Path, program: ResolvedProgram) -> None:
    from graphtrain.checkpoints.mindspore_strategy import write_ckpt

    write_ckpt(path, program)


_WRITERS: dict[str, Callable[[Path, ResolvedProgram], None]] = {
    ".json": write_json,
    ".ckpt": _write_ckpt,
}


def save_strategy(path: Path, program: ResolvedProgram) -> None:
    """Write the strategy of a program in the format of the file's suffix, .json or .ckpt.

    Raises:
        PlanError: unknown suffix, or the file cannot be written.
    """
    if path.suffix not in _WRITERS:
        suffixes = " or ".join(_WRITERS)
        raise PlanError(f"{path}: unknown suffix of a strategy file; use {suffixes}")
    try:
        _WRITERS[path.suffix](path, program)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from error
