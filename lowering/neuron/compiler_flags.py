"""Flags for neuronx-cc, by its version."""

import os
import shlex

from lowering.machine.target import Target

# If no compiler is installed, bundles are written with the flags of this version: SDK 2.32.
NEWEST_VERSION = "2.27.5334.0"
# Options of the wrapper that torch-neuronx and JAX call; the compiler itself rejects them.
_WRAPPER_ONLY = (
    "--cache_dir",
    "--compile_workdir",
    "--dump",
    "--log_level",
    "--no_cache",
    "--retry_failed_compilation",
)


def flags(target: Target, version: str, *, fast: bool = False) -> list[str]:
    """Return the flags for a compiler version, in a fixed order; NEURON_CC_FLAGS come last.

    Every flag whose default has changed between versions, or will change, is set explicitly, so
    that results do not depend on the version. `fast` lowers the optimisation level, for programs
    that run once.

    Source: neuronx-cc's command line reference, SDK 2.32, and its release notes (2.27: automatic
    casts off; next: 64-bit integers on, no downcast of integers).
    """
    specification = target.specification["neuron"]
    release = tuple(int(component) for component in version.split("+")[0].split(".")[:2])
    chosen = [
        f"--target={specification['target']}",
        "--model-type=transformer",
        "--auto-cast=none",
        f"--optlevel={1 if fast else 2}",
        "--enable-mixed-precision-accumulation",
    ]
    if specification["target"] != "trn1":  # trn1 has no logical cores and rejects the flag
        chosen.append(f"--logical-nc-config={specification['cores']}")
    if release >= (2, 27):
        # Preflight has checked that indices fit 32 bits; the hardware has no 64-bit integers.
        chosen += ["--native-int64=disabled", "--implicit-integer-downcast=all"]
    if target.runs_on_cpu:
        chosen.append(f"--simulated-ranks={target.devices}")
    return chosen + without_wrapper_flags(shlex.split(os.environ.get("NEURON_CC_FLAGS", "")))


def without_wrapper_flags(flags: list[str]) -> list[str]:
    """Return the flags without those of AWS's wrapper, which the compiler would reject."""
    return [flag for flag in flags if not flag.startswith(_WRAPPER_ONLY)]
