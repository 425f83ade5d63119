"""All problems of a configuration for one purpose, as lines with their place."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphtrain.api.checks.checkpoint import checkpoint_problems
from graphtrain.api.checks.data import data_problems
from graphtrain.api.checks.machine import (
    compiler_problems,
    model_problems,
    output_problems,
    page_problems,
    run_problems,
)
from graphtrain.api.checks.problem import Kind, Problem
from graphtrain.api.checks.program import program_problems
from graphtrain.config.schema import Config


@dataclass(frozen=True)
class Purpose:
    """Use of a configuration, and the problems that are errors or warnings for it."""

    errors: Collection[Kind]
    warnings: Collection[Kind] = ()
    train: bool = True  # the training data is read
    weights_only: bool = False  # of a checkpoint
    compiles: bool = False

    @property
    def kinds(self) -> set[Kind]:
        return {*self.errors, *self.warnings}


_EVERY: tuple[Kind, ...] = ("program", "data", "missing_data", "checkpoint", "machine")
CHECK = Purpose(_EVERY)
SHOW = Purpose(("program", "data"))
PLAN = Purpose(("program", "machine"), ("data",))
SEARCH = Purpose(("machine",), ("data",))  # chooses the mesh and the rules itself
# A program may be compiled on a machine without the data, and ahead of a permitted change.
COMPILE = Purpose(("program", "data", "machine"), ("missing_data", "checkpoint"), compiles=True)
RUN = Purpose(_EVERY)
RUN_AND_COMPILE = Purpose(_EVERY, compiles=True)
_NEW: tuple[Kind, ...] = ("program", "data", "missing_data", "machine")
FRESH_RUN = Purpose(_NEW)  # sets the checkpoints of an earlier run aside
FRESH_RUN_AND_COMPILE = Purpose(_NEW, compiles=True)
EVALUATE = Purpose(_EVERY, train=False, weights_only=True)
EVALUATE_BIGRAM = Purpose(_EVERY, weights_only=True)
LAUNCH = Purpose(_EVERY)
LAUNCH_ELSEWHERE = Purpose(("program", "data"))  # data and directories are on another machine


def problems(
    config: Config,
    purpose: Purpose = CHECK,
    *,
    outputs: Mapping[str, Path | None] | None = None,
    allowed_changes: Sequence[str] = (),
) -> list[Problem]:
    """Return everything that is known to be wrong before anything is traced or compiled.

    Args:
        config: the configuration.
        purpose: what it is going to be used for.
        outputs: files that will be written, by the option that names each.
        allowed_changes: settings that may differ from those of the checkpoint.
    """
    kinds = purpose.kinds
    found = [*program_problems(config.program)]
    found += [problem for option, path in (outputs or {}).items() if path is not None
              for problem in _output(option, path)]  # fmt: skip
    if "machine" in kinds:
        found += model_problems(config.program)
    if purpose.compiles:
        found += compiler_problems(config.program)
    if "missing_data" in kinds and "machine" in kinds:
        found += run_problems(config)
    if kinds & {"data", "missing_data"}:
        found += data_problems(config, train=purpose.train)
    if "checkpoint" in kinds:
        found += checkpoint_problems(config, allowed_changes, weights_only=purpose.weights_only)
    return [problem for problem in found if problem.kind in kinds]


def _output(option: str, path: Path) -> Iterator[Problem]:
    if option == "--html":
        yield from page_problems()
    yield from output_problems(option, path)
