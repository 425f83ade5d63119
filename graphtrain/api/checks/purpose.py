"""Uses of a configuration, and which of its problems are errors for each. Imports nothing heavy."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

# program: nothing can be planned or compiled. data: a dataset that does not suit the program.
# missing_data: a dataset that is not on this machine. checkpoint: one of another run.
# machine: a package, a directory or a file that this machine lacks. compiler: that of the target,
# which plans do without. doubt: what is computed as asked, and probably not what is wanted.
# data_doubt: a dataset or images that may not be what the model expects, or that a new run would
# refuse and a saved one trained with.
Kind = Literal[
    "program", "data", "missing_data", "checkpoint", "machine", "compiler", "doubt", "data_doubt"
]


@dataclass(frozen=True)
class Purpose:
    """Use of a configuration, and the problems that are errors or warnings for it."""

    errors: Collection[Kind]
    warnings: Collection[Kind] = ()
    train: bool = True  # the training data is read
    weights_only: bool = False  # of a checkpoint
    trains_batches: bool = True  # False: the graphs have batches of their own
    fresh: bool = False  # the checkpoints of the run directory are set aside

    @property
    def kinds(self) -> set[Kind]:
        return {*self.errors, *self.warnings}

    def covers(self, other: "Purpose") -> bool:
        """Return whether what is checked for this purpose need not be checked for another."""
        return {*other.errors} <= {*self.errors}


_EVERY: tuple[Kind, ...] = ("program", "data", "missing_data", "checkpoint", "machine")
CHECK = Purpose(_EVERY, ("compiler", "doubt", "data_doubt"))
SHOW = Purpose(("program", "data"))
PLAN = Purpose(("program", "machine"), ("data", "doubt"))
SEARCH = Purpose(("machine",), ("data",))  # chooses the mesh and the rules itself
# A program may be compiled on a machine without the data, and ahead of a permitted change.
COMPILE = Purpose(
    ("program", "data", "machine", "compiler"),
    ("missing_data", "checkpoint", "doubt", "data_doubt"),
)
# Programs that generate or score read no dataset, and have batches of their own.
COMPILE_SERVING = Purpose(
    ("program", "machine", "compiler"), ("checkpoint", "doubt"), trains_batches=False
)
GENERATE = Purpose(
    ("program", "machine", "compiler", "checkpoint"),
    ("doubt",),
    weights_only=True,
    trains_batches=False,
)
SERVE = Purpose(
    ("program", "machine", "checkpoint"), ("doubt",), weights_only=True, trains_batches=False
)
LAUNCH = Purpose(_EVERY)
LAUNCH_ELSEWHERE = Purpose(("program", "data"))  # data and directories are on another machine

_NEW: tuple[Kind, ...] = ("program", "data", "missing_data", "machine")


def compile_purpose(graphs: str) -> Purpose:
    """Return the purpose of compiling the graphs that `--for` names."""
    return COMPILE if graphs in ("train", "dump") else COMPILE_SERVING


def run_purpose(*, fresh: bool = False, compiles: bool = False) -> Purpose:
    """Return the purpose of a run.

    Args:
        fresh: whether the checkpoints of an earlier run are set aside.
        compiles: whether it compiles the missing programs first.
    """
    errors = _NEW if fresh else _EVERY
    errors = (*errors, "compiler") if compiles else errors
    return Purpose(errors, ("data_doubt",), fresh=fresh)


def dump_purpose(*, compiles: bool = False, restores: bool = True) -> Purpose:
    """Return the purpose of a dump; the settings may differ from those of the checkpoint.

    Args:
        compiles: whether it compiles the missing programs first.
        restores: whether it may start from a checkpoint.
    """
    errors = _EVERY if restores else _NEW
    errors = (*errors, "compiler") if compiles else errors
    return Purpose(errors, ("data_doubt",), weights_only=True)


def evaluation_purpose(*, bigram: bool = False) -> Purpose:
    """Return the purpose of an evaluation; that of a bigram model reads the training data."""
    return Purpose(_EVERY, ("data_doubt",), train=bigram, weights_only=True)
