"""A problem of a configuration that is known before anything is compiled."""

from dataclasses import dataclass
from typing import Literal

from graphtrain.config.lines import KeyPath

# program: nothing can be planned or compiled. data: a dataset that does not suit the program.
# missing_data: a dataset that is not on this machine. checkpoint: one of another run.
# machine: a package, a directory or a file that this machine lacks.
Kind = Literal["program", "data", "missing_data", "checkpoint", "machine"]


@dataclass(frozen=True)
class Problem:
    """One problem: what is wrong, and what to change."""

    kind: Kind
    message: str
    # Settings that cause it, of which the message is located at one; empty: those that it names.
    settings: tuple[KeyPath, ...] = ()
    # Place in another file or on the command line; empty: the message begins with its place.
    location: str | None = None
