"""neuronx-cc: its flags by version, its command, what it says when it fails."""

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

# The version whose flags a bundle for a compiler that is not here is written for: SDK 2.32.
NEWEST = "2.27.5334.0"
_SIMULATOR = "lowering.neuron.simulator"
TOO_LITTLE_MEMORY = ("EOOM001", "EOOM002", "EVRF009", "EXSP001")
_ERROR_CODE = re.compile(r"\[?NCC_([A-Z]{4}\d{3})\]?:? *(.*)")
_SIGNALLED = re.compile(r"\[F(1\d\d)\] neuronx-cc")  # printed before it exits with 70
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*(?:\+[0-9a-f]+)?(?:\+simulator)?")
# Who compiles for Neuron's devices: neuronx-cc as it is, or AWS's library, which calls it.
CHOICE, LIBRARY = "GRAPHTRAIN_NEURON_COMPILER", "libneuronxla"
# Options of the wrapper that torch-neuronx and JAX call; the compiler knows none of them.
_WRAPPER_ONLY = (
    "--cache_dir",
    "--compile_workdir",
    "--dump",
    "--log_level",
    "--no_cache",
    "--retry_failed_compilation",
)


class CompilerFailed(LoweringError):
    """neuronx-cc refused a program; it would again."""


class CompilerInterrupted(LoweringError):
    """neuronx-cc was ended from outside; the program may be sound."""


@dataclass(frozen=True)
class Compiler:
    """A compiler that can be run here."""

    command: tuple[str, ...]
    version: str  # as it says itself, as in "2.27.5334.0+a3f3b4c7"

    @property
    def directory(self) -> str:
        """The directory of a Neuron persistent cache in which its NEFFs belong."""
        return f"neuronxcc-{self.version}"


@functools.cache
def find(target: Target) -> Compiler | None:
    """The compiler for a target, if it is installed.

    Raises:
        LoweringError: it is there but does not say its version.
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
    """The version that a compiler says it has.

    Raises:
        LoweringError: there is none in what it said.
    """
    found = _VERSION.search(text)
    if found is None:
        raise LoweringError(f"{where} says no version of neuronx-cc: {text[-300:]!r}")
    return found[0]


def flags(target: Target, version: str, *, quickly: bool = False) -> list[str]:
    """The flags for a compiler of a version, in a fixed order; NEURON_CC_FLAGS come last.

    Everything whose default has changed between versions, or will, is said: numbers then do not
    depend on the version. Source: neuronx-cc's command line reference, SDK 2.32, and its release
    notes (2.27: automatic casts off; next: 64-bit integers on, no downcast of integers).
    """
    about = target.specification["neuron"]
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    chosen = [
        f"--target={about['target']}",
        "--model-type=transformer",
        "--auto-cast=none",
        f"--optlevel={1 if quickly else 2}",
        "--enable-mixed-precision-accumulation",
    ]
    if about["target"] != "trn1":  # which has no logical cores, and refuses the flag
        chosen.append(f"--logical-nc-config={about['cores']}")
    if release >= (2, 27):
        # Indices fit 32 bits, which preflight has checked; the hardware has no 64-bit integers.
        chosen += ["--native-int64=disabled", "--implicit-integer-downcast=all"]
    if target.runs_on_cpu:
        chosen.append(f"--simulated-ranks={target.devices}")
    return chosen + forwarded(shlex.split(os.environ.get("NEURON_CC_FLAGS", "")))


def arguments(program: str, output: str, chosen: list[str]) -> list[str]:
    """What follows the compiler's name on its command line."""
    return ["compile", "--framework=XLA", program, "--output", output, *chosen]


def timed(
    compiler: Compiler, hlo: bytes, chosen: list[str], *, graph: str, target: Target
) -> tuple[bytes, float]:
    """Compile as run() does; return the NEFF and the seconds it took."""
    began = time.perf_counter()
    payload = run(compiler, hlo, chosen, graph=graph, target=target)
    return payload, time.perf_counter() - began


def run(compiler: Compiler, hlo: bytes, chosen: list[str], *, graph: str, target: Target) -> bytes:
    """Compile a normalised module to a NEFF. What the compiler says goes to standard error.

    Raises:
        OutOfMemory: the program does not fit the device.
        CompilerFailed: the compiler refused the program; with its codes.
        CompilerInterrupted: a signal ended the compiler.
    """
    if _through_library(target):
        from lowering.neuron import library  # which imports this module

        return library.compile(hlo, chosen, graph=graph, target=target)
    with tempfile.TemporaryDirectory(prefix="graphtrain-neuron-") as name:
        directory = Path(name)
        (directory / HLO_FILE).write_bytes(hlo)
        (directory / FLAGS_FILE).write_text(json.dumps(chosen))
        words = [*compiler.command, *arguments(HLO_FILE, NEFF_FILE, chosen)]
        print("$", shlex.join(words), file=sys.stderr, flush=True)
        ended = subprocess.run(
            [*tied(), *words], cwd=directory, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
        )  # fmt: skip
        print(ended.stdout, file=sys.stderr, flush=True)
        if ended.returncode:
            raise failure(ended.returncode, ended.stdout, graph=graph, target=target)
        made = directory / NEFF_FILE
        if not made.exists():
            raise CompilerFailed(f"neuronx-cc ended well for {graph}, and wrote no {NEFF_FILE}")
        payload = made.read_bytes()
    neff.check(payload, simulated=target.runs_on_cpu, what=f"the compiled {graph} step")
    return payload


def _through_library(target: Target) -> bool:
    """Whether the environment asks for AWS's library.

    Raises:
        LoweringError: it asks for something else.
    """
    asked = os.environ.get(CHOICE, "neuronx-cc")
    if asked not in ("neuronx-cc", LIBRARY):
        raise LoweringError(f"{CHOICE}={asked} is neither neuronx-cc nor {LIBRARY}")
    return asked == LIBRARY and not target.runs_on_cpu


def failure(status: int, log: str, *, graph: str, target: Target) -> LoweringError:
    """What an unsuccessful compilation was: to be repeated with more memory, or not at all."""
    number = ending_signal(status, log)
    if number is not None:
        known = number in set(signal.Signals)
        name = signal.Signals(number).name if known else f"signal {number}"
        hint = "; the machine may be out of memory, try --jobs 1" if name == "SIGKILL" else ""
        return CompilerInterrupted(
            f"neuronx-cc was ended by {name} while it compiled {graph}{hint}"
        )
    told_by_code = errors(log)
    for code, said in told_by_code:
        if code in TOO_LITTLE_MEMORY:
            return OutOfMemory(graph, target, f"NCC_{code} {said}")
    told = "; ".join(dict.fromkeys(f"NCC_{code} {said}" for code, said in told_by_code[:5]))
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "it said nothing")
    return CompilerFailed(f"neuronx-cc refused {graph} (status {status}): {told or last}")


def ending_signal(status: int | None, log: str) -> int | None:
    """The signal that ended the compiler or a process of its own, if one did.

    Args:
        status: as subprocess has it; None where only the log is left.
    """
    if status is not None and (status < 0 or status > 128):
        return -status if status < 0 else status - 128
    found = _SIGNALLED.search(log)
    return int(found[1]) - 128 if found else None


def errors(log: str) -> list[tuple[str, str]]:
    """Every error that a compiler's output tells by a code, as in ("EVRF004", "complex types")."""
    found = map(_ERROR_CODE.search, log.splitlines())
    return [(each[1], each[2]) for each in found if each]


def forwarded(asked: list[str]) -> list[str]:
    """The flags without those that are for AWS's wrapper, which the compiler would refuse."""
    return [flag for flag in asked if not flag.startswith(_WRAPPER_ONLY)]


def tied() -> list[str]:
    """What sends a command SIGTERM when its parent dies; a part of util-linux.

    Without it a compiler of a killed run works on, for nothing but without harm.
    """
    return ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []


def environment() -> dict[str, str]:
    """Ours, with our packages on the path: the simulator is one of their modules."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}
