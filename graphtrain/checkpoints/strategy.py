"""Strategy file: the shardings of a program's arrays, without compiling the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from graphtrain.config.schema import Program
from graphtrain.errors import PlanError

_FORMAT = 1


@dataclass(frozen=True)
class Strategy:
    """A program and the shardings of its state, by path as in "parameters/head"."""

    program: Program
    arrays: dict[
        str, dict[str, Any]
    ]  # shape, axes, dtype, memory and split: mesh axes by dimension


def strategy_of(program: Program) -> Strategy:
    """Return the strategy of a program. This traces it, which takes seconds.

    Raises:
        LoweringError: unknown target.
        ShardingError: the rules cannot split an array.
    """
    from graphtrain.graphs.plan import plan_program

    plan = plan_program(program)
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
    return Strategy(program, arrays)


def write_json(path: Path, program: Program) -> None:
    """Write a strategy as JSON, for `graphtrain convert reshard` and for other programs."""
    from graphtrain.config.resolve import layer_rows, mesh_shape

    strategy = strategy_of(program)
    about = {
        "graphtrain_strategy": _FORMAT,
        "mesh": dict(mesh_shape(program).axes),
        "rows": layer_rows(program),  # layer in each row of stacked arrays; null: padding
        "arrays": strategy.arrays,
        "program": asdict(program),
    }
    path.write_text(_lines(about) + "\n", encoding="utf-8")


def _lines(about: dict[str, Any]) -> str:
    """Format JSON with one line for each array and each other entry."""
    arrays = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in about["arrays"].items()
    )
    rest = (
        f" {json.dumps(name)}: " + (f"{{\n{arrays}\n }}" if name == "arrays" else json.dumps(one))
        for name, one in about.items()
    )
    return "{\n" + ",\n".join(rest) + "\n}"


def read_json(path: Path) -> Strategy:
    """Read a strategy file written by write_json.

    Raises:
        PlanError: the file does not exist or is not a strategy.
    """
    if not path.is_file():
        raise PlanError(f"{path}: file not found; {_remedy(path)}")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["graphtrain_strategy"] != _FORMAT:
            raise ValueError(f"format {about['graphtrain_strategy']} is not {_FORMAT}")
        program = TypeAdapter(Program).validate_json(json.dumps(about["program"]))
        return Strategy(program, {name: dict(one) for name, one in about["arrays"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} is not a strategy file ({error!r}); {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    return f"create it with: graphtrain plan CONFIG --save-strategy {path}"


def _write_ckpt(path: Path, program: Program) -> None:
    from graphtrain.checkpoints.mindspore_strategy import write_ckpt

    write_ckpt(path, program)


_WRITERS: dict[str, Callable[[Path, Program], None]] = {".json": write_json, ".ckpt": _write_ckpt}


def save_strategy(path: Path, program: Program) -> None:
    """Write the strategy of a program in the format of the file's suffix, .json or .ckpt.

    Raises:
        PlanError: unknown suffix, or the file cannot be written.
    """
    if path.suffix not in _WRITERS:
        known = " or ".join(_WRITERS)
        raise PlanError(f"{path}: unknown suffix of a strategy file; use {known}")
    try:
        _WRITERS[path.suffix](path, program)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from error
