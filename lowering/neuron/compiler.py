"""neuronx-cc: its command line, and the meaning of its failures."""

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lowering.errors import LoweringError, OutOfMemory
from lowering.machine.target import Target
from lowering.neuron import neff

HLO_FILE, NEFF_FILE, FLAGS_FILE = "model.hlo_module.pb", "model.neff", "compile_flags.json"

_SIMULATOR = "lowering.neuron.simulator"
OUT_OF_MEMORY_CODES = ("EOOM001", "EOOM002", "EVRF009", "EXSP001")
_ERROR_CODE = re.compile(r"\[?NCC_([A-Z]{4}\d{3})\]?:? *(.*)")
_SIGNALLED = re.compile(r"\[F(1\d\d)\] neuronx-cc")  # printed before exit status 70
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*(?:\+[0-9a-f]+)?(?:\+simulator)?")


class CompilerFailed(LoweringError):
    """neuronx-cc rejected a program, and would reject it again."""


class CompilerInterrupted(LoweringError):
    """neuronx-cc was terminated by a signal; the program may be valid."""


@dataclass(frozen=True)
class Compiler:
    """A compiler that is installed on this machine."""

    command: tuple[str, ...]
    version: str  # as the compiler reports it, for example "2.27.5334.0+a3f3b4c7"

    @property
    def directory(self) -> str:
        """Name of the directory for this compiler's NEFFs in a Neuron persistent cache."""
        return f"neuronxcc-{self.version}"


@functools.cache
def find_compiler(target: Target) -> Compiler | None:
    """Return the compiler for a target, or None if it is not installed.

    Raises:
        LoweringError: the compiler does not report its version.
    """
    if target.runs_on_cpu:
        command = (sys.executable, "-m", _SIMULATOR)
    elif executable := shutil.which("neuronx-cc"):
        command = (executable,)
    else:
        return None
    version_command = [*command, "--version"]
    completed = subprocess.run(version_command, capture_output=True, text=True, env=environment())
    return Compiler(
        command, version_in(completed.stdout + completed.stderr, shlex.join(version_command))
    )


def version_in(text: str, where: str) -> str:
    """Return the compiler version in `text`; `where` names the source of the text in errors.

    Raises:
        LoweringError: the text contains no version.
    """
    match = _VERSION.search(text)
    if match is None:
        raise LoweringError(f"{where} contains no version of neuronx-cc: {text[-300:]!r}")
    return match[0]


def arguments(program: str, output: str, chosen: list[str]) -> list[str]:
    """Return the arguments that follow the compiler's name on its command line."""
    return ["compile", "--framework=XLA", program, "--output", output, *chosen]


def run(compiler: Compiler, hlo: bytes, chosen: list[str], *, graph: str, target: Target) -> bytes:
    """Compile a normalised module to a NEFF; print the compiler's output to standard error.

    Raises:
        OutOfMemory: the program does not fit the device's memory.
        CompilerFailed: the compiler rejected the program; the message lists its error codes.
        CompilerInterrupted: a signal terminated the compiler.
    """
    with tempfile.TemporaryDirectory(prefix="graphtrain-neuron-") as name:
        directory = Path(name)
        (directory / HLO_FILE).write_bytes(hlo)
        (directory / FLAGS_FILE).write_text(json.dumps(chosen))
        command = [*compiler.command, *arguments(HLO_FILE, NEFF_FILE, chosen)]
        print("$", shlex.join(command), file=sys.stderr, flush=True)
        completed = subprocess.run(
            [*kill_with_parent_prefix(), *command],
            cwd=directory,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        print(completed.stdout, file=sys.stderr, flush=True)
        if completed.returncode:
            raise compile_error(completed.returncode, completed.stdout, graph=graph, target=target)
        neff_path = directory / NEFF_FILE
        if not neff_path.exists():
            raise CompilerFailed(f"neuronx-cc exited with 0 for {graph}, but wrote no {NEFF_FILE}")
        payload = neff_path.read_bytes()
    neff.check(payload, simulated=target.runs_on_cpu, what=f"the compiled {graph} step")
    return payload


def compile_error(status: int, log: str, *, graph: str, target: Target) -> LoweringError:
    """Return the error for a failed compilation: interrupted, out of memory, or rejected."""
    signal_number = ending_signal(status, log)
    if signal_number is not None:
        is_known = signal_number in set(signal.Signals)
        name = signal.Signals(signal_number).name if is_known else f"signal {signal_number}"
        hint = "; the machine may be out of memory, try --jobs 1" if name == "SIGKILL" else ""
        return CompilerInterrupted(
            f"neuronx-cc was terminated by {name} while it compiled {graph}{hint}"
        )
    errors = coded_errors(log)
    for code, message in errors:
        if code in OUT_OF_MEMORY_CODES:
            return OutOfMemory(graph, target, f"NCC_{code} {message}")
    summary = "; ".join(dict.fromkeys(f"NCC_{code} {message}" for code, message in errors[:5]))
    last_line = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return CompilerFailed(f"neuronx-cc rejected {graph} (status {status}): {summary or last_line}")


def ending_signal(status: int | None, log: str) -> int | None:
    """Return the signal that ended the compiler or one of its child processes, or None.

    Args:
        status: exit status as subprocess reports it; None if only the log is available.
        log: output of the compiler.
    """
    if status is not None and (status < 0 or status > 128):
        return -status if status < 0 else status - 128
    match = _SIGNALLED.search(log)
    return int(match[1]) - 128 if match else None


def coded_errors(log: str) -> list[tuple[str, str]]:
    """Return the coded errors in a compiler's output, for example ("EVRF004", "complex types")."""
    matches = map(_ERROR_CODE.search, log.splitlines())
    return [(match[1], match[2]) for match in matches if match]


def kill_with_parent_prefix() -> list[str]:
    """Return a command prefix that sends the command SIGTERM when its parent process dies.

    setpriv is part of util-linux. Where it is missing, the compiler of a killed run continues to
    the end, which is useless but harmless.
    """
    return ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []


def environment() -> dict[str, str]:
    """Return this process's environment, with graphtrain's packages on PYTHONPATH.

    The simulator, which is one of their modules, needs them.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}
