"""neuronx-cc: its flags by version, its command line, and the meaning of its failures."""

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
import time
from dataclasses import dataclass
from pathlib import Path

from lowering.errors import LoweringError, OutOfMemory
from lowering.machine.target import Target
from lowering.neuron import neff

HLO_FILE, NEFF_FILE, FLAGS_FILE = "model.hlo_module.pb", "model.neff", "compile_flags.json"

# If no compiler is installed, bundles are written with the flags of this version: SDK 2.32.
NEWEST_VERSION = "2.27.5334.0"
_SIMULATOR = "lowering.neuron.simulator"
OUT_OF_MEMORY_CODES = ("EOOM001", "EOOM002", "EVRF009", "EXSP001")
_ERROR_CODE = re.compile(r"\[?NCC_([A-Z]{4}\d{3})\]?:? *(.*)")
_SIGNALLED = re.compile(r"\[F(1\d\d)\] neuronx-cc")  # printed before exit status 70
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*(?:\+[0-9a-f]+)?(?:\+simulator)?")
# Environment variable that selects how to compile for Neuron devices: neuronx-cc itself (the
# default), or AWS's library, which calls it.
COMPILER_VARIABLE, LIBNEURONXLA = "GRAPHTRAIN_NEURON_COMPILER", "libneuronxla"
# Options of the wrapper that torch-neuronx and JAX call; the compiler itself rejects them.
_WRAPPER_ONLY = (
    "--cache_dir",
    "--compile_workdir",
    "--dump",
    "--log_level",
    "--no_cache",
    "--retry_failed_compilation",
)


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
    elif found := shutil.which("neuronx-cc"):
        command = (found,)
    else:
        return None
    asked = [*command, "--version"]
    said = subprocess.run(asked, capture_output=True, text=True, env=environment())
    return Compiler(command, version_in(said.stdout + said.stderr, shlex.join(asked)))


def version_in(text: str, where: str) -> str:
    """Return the compiler version in `text`; `where` names the source of the text in errors.

    Raises:
        LoweringError: the text contains no version.
    """
    found = _VERSION.search(text)
    if found is None:
        raise LoweringError(f"{where} contains no version of neuronx-cc: {text[-300:]!r}")
    return found[0]


def flags(target: Target, version: str, *, fast: bool = False) -> list[str]:
    """Return the flags for a compiler version, in a fixed order; NEURON_CC_FLAGS come last.

    Every flag whose default has changed between versions, or will change, is set explicitly, so
    that results do not depend on the version. `quickly` lowers the optimisation level, for programs
    that run once.

    Source: neuronx-cc's command line reference, SDK 2.32, and its release notes (2.27: automatic
    casts off; next: 64-bit integers on, no downcast of integers).
    """
    about = target.specification["neuron"]
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    chosen = [
        f"--target={about['target']}",
        "--model-type=transformer",
        "--auto-cast=none",
        f"--optlevel={1 if fast else 2}",
        "--enable-mixed-precision-accumulation",
    ]
    if about["target"] != "trn1":  # trn1 has no logical cores and rejects the flag
        chosen.append(f"--logical-nc-config={about['cores']}")
    if release >= (2, 27):
        # Preflight has checked that indices fit 32 bits; the hardware has no 64-bit integers.
        chosen += ["--native-int64=disabled", "--implicit-integer-downcast=all"]
    if target.runs_on_cpu:
        chosen.append(f"--simulated-ranks={target.devices}")
    return chosen + without_wrapper_flags(shlex.split(os.environ.get("NEURON_CC_FLAGS", "")))


def arguments(program: str, output: str, chosen: list[str]) -> list[str]:
    """Return the arguments that follow the compiler's name on its command line."""
    return ["compile", "--framework=XLA", program, "--output", output, *chosen]


def compile_timed(
    compiler: Compiler, hlo: bytes, chosen: list[str], *, graph: str, target: Target
) -> tuple[bytes, float]:
    """Compile as `run` does; return the NEFF and the compile time in seconds."""
    began = time.perf_counter()
    payload = run(compiler, hlo, chosen, graph=graph, target=target)
    return payload, time.perf_counter() - began


def run(compiler: Compiler, hlo: bytes, chosen: list[str], *, graph: str, target: Target) -> bytes:
    """Compile a normalised module to a NEFF; print the compiler's output to standard error.

    Raises:
        OutOfMemory: the program does not fit the device's memory.
        CompilerFailed: the compiler rejected the program; the message lists its error codes.
        CompilerInterrupted: a signal terminated the compiler.
    """
    if _uses_library(target):
        from lowering.neuron import library  # imports this module

        return library.compile_through_library(hlo, chosen, graph=graph, target=target)
    with tempfile.TemporaryDirectory(prefix="graphtrain-neuron-") as name:
        directory = Path(name)
        (directory / HLO_FILE).write_bytes(hlo)
        (directory / FLAGS_FILE).write_text(json.dumps(chosen))
        words = [*compiler.command, *arguments(HLO_FILE, NEFF_FILE, chosen)]
        print("$", shlex.join(words), file=sys.stderr, flush=True)
        ended = subprocess.run(
            [*kill_with_parent_prefix(), *words],
            cwd=directory,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        print(ended.stdout, file=sys.stderr, flush=True)
        if ended.returncode:
            raise compile_error(ended.returncode, ended.stdout, graph=graph, target=target)
        made = directory / NEFF_FILE
        if not made.exists():
            raise CompilerFailed(f"neuronx-cc exited with 0 for {graph}, but wrote no {NEFF_FILE}")
        payload = made.read_bytes()
    neff.check(payload, simulated=target.runs_on_cpu, what=f"the compiled {graph} step")
    return payload


def _uses_library(target: Target) -> bool:
    """Return whether the environment selects AWS's library.

    Raises:
        LoweringError: the environment variable has an unknown value.
    """
    asked = os.environ.get(COMPILER_VARIABLE, "neuronx-cc")
    if asked not in ("neuronx-cc", LIBNEURONXLA):
        raise LoweringError(
            f"{COMPILER_VARIABLE}={asked} is neither neuronx-cc nor {LIBNEURONXLA}; set it to one "
            "of them, or "
            "unset it for neuronx-cc"
        )
    return asked == LIBNEURONXLA and not target.runs_on_cpu


def compile_error(status: int, log: str, *, graph: str, target: Target) -> LoweringError:
    """Return the error for a failed compilation: interrupted, out of memory, or rejected."""
    number = ending_signal(status, log)
    if number is not None:
        known = number in set(signal.Signals)
        name = signal.Signals(number).name if known else f"signal {number}"
        hint = "; the machine may be out of memory, try --jobs 1" if name == "SIGKILL" else ""
        return CompilerInterrupted(
            f"neuronx-cc was terminated by {name} while it compiled {graph}{hint}"
        )
    told_by_code = coded_errors(log)
    for code, said in told_by_code:
        if code in OUT_OF_MEMORY_CODES:
            return OutOfMemory(graph, target, f"NCC_{code} {said}")
    told = "; ".join(dict.fromkeys(f"NCC_{code} {said}" for code, said in told_by_code[:5]))
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return CompilerFailed(f"neuronx-cc rejected {graph} (status {status}): {told or last}")


def ending_signal(status: int | None, log: str) -> int | None:
    """Return the signal that ended the compiler or one of its child processes, or None.

    Args:
        status: exit status as subprocess reports it; None if only the log is available.
        log: output of the compiler.
    """
    if status is not None and (status < 0 or status > 128):
        return -status if status < 0 else status - 128
    found = _SIGNALLED.search(log)
    return int(found[1]) - 128 if found else None


def coded_errors(log: str) -> list[tuple[str, str]]:
    """Return the coded errors in a compiler's output, for example ("EVRF004", "complex types")."""
    found = map(_ERROR_CODE.search, log.splitlines())
    return [(each[1], each[2]) for each in found if each]


def without_wrapper_flags(asked: list[str]) -> list[str]:
    """Return the flags without those of AWS's wrapper, which the compiler would reject."""
    return [flag for flag in asked if not flag.startswith(_WRAPPER_ONLY)]


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
