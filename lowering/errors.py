"""Errors of lowering, compiling and loading that a user can fix."""

from collections.abc import Mapping
from typing import Any

from sharding_rules.errors import UserError


class LoweringError(UserError, RuntimeError):
    """A graph cannot be lowered, compiled or loaded; the message says what to change."""


class PeerLost(LoweringError):
    """Another process of the run has ended, stopped or stalled; the run resumes if it is restarted.

    Its status is EX_TEMPFAIL of sysexits.h, on which launchers start the run again.
    """

    exit_status = 75


class RankFailed(LoweringError):
    """A command failed on a rank: by itself, or because a rank of another process is lost."""

    others_are_there = False  # whether the other processes are known to be there


class RankEnded(PeerLost):
    """A rank has ended by itself: through a fault of its own, or because another one is lost."""


class OutOfMemory(LoweringError):
    """A program does not fit in device memory, as reported by the compiler or the device."""

    def __init__(self, graph: str, target: object, said: str, largest: str = "") -> None:
        first = said.partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
        self.graph, self.target, self.compiler_message = graph, target, said
        largest_note = f"; estimated largest: {largest}" if largest else ""
        super().__init__(
            f"{graph} does not fit in the memory of {target}: {first}{largest_note}; "
            "run graphtrain plan for the cheapest changes that would fit"
        )


class CompilerMissing(LoweringError):
    """The target's compiler is not installed; carries the input files that it would be given."""

    def __init__(
        self, message: str, files: Mapping[str, bytes], preflight: Mapping[str, Any]
    ) -> None:
        super().__init__(message)
        self.files = files  # compiler input by file name, for the caller to write to a directory
        self.preflight = preflight  # facts found in the program without the compiler
