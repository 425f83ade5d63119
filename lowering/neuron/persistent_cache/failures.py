"""Why a compilation failed: the program's fault, or the machine's, which says nothing of it."""

import re
import signal
from dataclasses import dataclass
from typing import Literal, get_args

from lowering.neuron import compiler

Kind = Literal[
    "refused",  # by one of the compiler's own codes: it would say so again
    "out of memory",  # of the host, or of the device
    "killed",  # SIGKILL, as the kernel ends what takes its memory
    "interrupted",  # Ctrl-C, or the end of a job
    "timed out",
    "crashed",  # without a code: a missing library as well as a defect
    "not stored",  # a full disk, or a file that does not belong there
    "not started",  # the entry lacks what compiling it takes, or the disk is full
]

_OUT_OF_MEMORY = re.compile(
    r"MemoryError|std::bad_alloc|Cannot allocate memory|\bout of memory\b", re.IGNORECASE
)
_NOTHING = ("", "Killed", "Terminated")  # a shell's words, not the compiler's
_ASKED_TO_STOP = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


@dataclass(frozen=True)
class Failure:
    """Why there is no NEFF."""

    kind: Kind
    said: str
    codes: tuple[str, ...] = ()  # of the compiler, as in "NCC_EVRF004"

    @property
    def is_final(self) -> bool:
        """Whether it is kept, and the program not compiled again unless asked."""
        return self.kind == "refused"

    @property
    def is_chance(self) -> bool:
        """Whether another attempt, with fewer at once, may end otherwise."""
        return self.kind in ("out of memory", "killed", "crashed") and not self.codes


def told(line: str) -> Failure:
    """A failure from the line that was written of it, as in "killed: said nothing"."""
    kind, _, said = line.partition(": ")
    return Failure(kind if kind in get_args(Kind) else "crashed", said)  # type: ignore[arg-type]


def classify(status: int | None, log: str) -> Failure:
    """What a compiler's exit status and what it printed tell.

    Args:
        status: as subprocess has it; None where only the log is left.
    """
    said = compiler.errors(log)
    codes = tuple(dict.fromkeys(f"NCC_{code}" for code, _ in said))
    lines = [line.strip() for line in log.splitlines()]
    last = next((line for line in reversed(lines) if line not in _NOTHING), "it said nothing")
    told = "; ".join(dict.fromkeys(f"NCC_{code} {what}" for code, what in said[:5])) or last
    number = compiler.ending_signal(status, log)
    if number in _ASKED_TO_STOP or "KeyboardInterrupt" in log:
        return Failure("interrupted", told)
    if any(code in compiler.TOO_LITTLE_MEMORY for code, _ in said):
        return Failure("out of memory", told, codes)
    if _OUT_OF_MEMORY.search(log):
        return Failure("out of memory", told)
    if number == signal.SIGKILL:
        return Failure("killed", f"{told} (SIGKILL)")
    if number is None and any(code.startswith("E") for code, _ in said):
        return Failure("refused", told, codes)
    return Failure("crashed", told if status is None else f"{told} (status {status})", codes)
