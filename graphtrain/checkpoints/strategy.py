"""A strategy: only how a program's arrays are split, as a file; nothing is compiled for it."""

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
    """A program, and where the arrays of its state live, by path as in "parameters/head"."""

    program: Program
    arrays: dict[
        str, dict[str, Any]
    ]  # shape, axes, dtype, memory and split: mesh axes by dimension


def strategy_of(program: Program) -> Strategy:
    """The strategy of a program; traces it, in seconds.

    Raises:
        LoweringError: no such target.
        ShardingError: an array cannot be placed.
    """
    from graphtrain.planning.assess import plan_program

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
    from graphtrain.config.resolve import mesh_shape, rows_of_layers

    strategy = strategy_of(program)
    about = {
        "graphtrain_strategy": _FORMAT,
        "mesh": dict(mesh_shape(program).axes),
        "rows": rows_of_layers(program),  # the layer in each row of stacked arrays; null: zeros
        "arrays": strategy.arrays,
        "program": asdict(program),
    }
    path.write_text(_lines(about) + "\n", encoding="utf-8")


def _lines(about: dict[str, Any]) -> str:
    """JSON with a line for each array and for each of the rest."""
    arrays = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in about["arrays"].items()
    )
    rest = (
        f" {json.dumps(name)}: " + (f"{{\n{arrays}\n }}" if name == "arrays" else json.dumps(one))
        for name, one in about.items()
    )
    return "{\n" + ",\n".join(rest) + "\n}"


def read_json(path: Path) -> Strategy:
    """Read what write_json wrote.

    Raises:
        PlanError: it is no such file.
    """
    if not path.is_file():
        raise PlanError(f"{path}: no such file; {_remedy(path)}")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["graphtrain_strategy"] != _FORMAT:
            raise ValueError(f"format {about['graphtrain_strategy']} is not {_FORMAT}")
        program = TypeAdapter(Program).validate_json(json.dumps(about["program"]))
        return Strategy(program, {name: dict(one) for name, one in about["arrays"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} is no strategy ({error!r}); {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    return f"write one: graphtrain plan CONFIG --save-strategy {path}"


def _write_ckpt(path: Path, program: Program) -> None:
    from graphtrain.checkpoints.mindspore_strategy import write_ckpt

    write_ckpt(path, program)


_WRITERS: dict[str, Callable[[Path, Program], None]] = {".json": write_json, ".ckpt": _write_ckpt}


def save_strategy(path: Path, program: Program) -> None:
    """Write the strategy of a program in the format that the file's suffix names.

    Raises:
        PlanError: no such format, or the file cannot be written.
    """
    if path.suffix not in _WRITERS:
        known = " or ".join(_WRITERS)
        raise PlanError(f"{path}: a strategy is written as {known}, by the file's suffix")
    try:
        _WRITERS[path.suffix](path, program)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from error
