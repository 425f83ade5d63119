"""Reasons for a failed compilation, which lie in the program or only in the machine."""

import re
import signal
from dataclasses import dataclass
from typing import Literal, get_args

from lowering.neuron import compiler

Kind = Literal[
    "refused",  # rejected with one of the compiler's own codes: it would be rejected again
    "out of memory",  # of the host, or of the device
    "killed",  # SIGKILL, for example by the kernel's out-of-memory killer
    "interrupted",  # Ctrl-C, or the end of a job
    "timed out",
    "crashed",  # without an error code: a missing library, or a defect of the compiler
    "not stored",  # the disk is full, or the file does not belong in the directory
    "not started",  # the entry lacks a file that compiling needs, or the disk is full
]

_OUT_OF_MEMORY = re.compile(
    r"MemoryError|std::bad_alloc|Cannot allocate memory|\bout of memory\b", re.IGNORECASE
)
_SHELL_MESSAGES = ("", "Killed", "Terminated")  # printed by a shell, not by the compiler
_STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


@dataclass(frozen=True)
class CompileFailure:
    """Reason why a compilation produced no NEFF."""

    kind: Kind
    message: str
    codes: tuple[str, ...] = ()  # the compiler's error codes, for example "NCC_EVRF004"

    @property
    def is_final(self) -> bool:
        """True if the program is compiled again only on request."""
        return self.kind == "refused"

    @property
    def is_chance(self) -> bool:
        """True if another attempt, with fewer compilers in parallel, may succeed."""
        return self.kind in ("out of memory", "killed", "crashed") and not self.codes


def parse_failure(line: str) -> CompileFailure:
    """Parse a failure from the line that records it, for example "killed: no output"."""
    kind, _, message = line.partition(": ")
    return CompileFailure(kind if kind in get_args(Kind) else "crashed", message)  # type: ignore[arg-type]


def classify(status: int | None, log: str) -> CompileFailure:
    """Determine the failure from a compiler's exit status and output.

    Args:
        status: exit status as subprocess reports it; None if only the log is available.
        log: output of the compiler.
    """
    errors = compiler.coded_errors(log)
    codes = tuple(dict.fromkeys(f"NCC_{code}" for code, _ in errors))
    lines = [line.strip() for line in log.splitlines()]
    last_line = next((line for line in reversed(lines) if line not in _SHELL_MESSAGES), "no output")
    message = (
        "; ".join(dict.fromkeys(f"NCC_{code} {text}" for code, text in errors[:5])) or last_line
    )
    signal_number = compiler.ending_signal(status, log)
    if signal_number in _STOP_SIGNALS or "KeyboardInterrupt" in log:
        return CompileFailure("interrupted", message)
    if any(code in compiler.OUT_OF_MEMORY_CODES for code, _ in errors):
        return CompileFailure("out of memory", message, codes)
    if _OUT_OF_MEMORY.search(log):
        return CompileFailure("out of memory", message)
    if signal_number == signal.SIGKILL:
        return CompileFailure("killed", f"{message} (SIGKILL)")
    if signal_number is None and any(code.startswith("E") for code, _ in errors):
        return CompileFailure("refused", message, codes)
    return CompileFailure(
        "crashed", message if status is None else f"{message} (status {status})", codes
    )
