"""Bundles: the files needed to compile a program on another machine that has neuronx-cc."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from lowering.errors import CompilerMissing, LoweringError
from lowering.machine.target import Target
from lowering.neuron import compiler, compiler_choice, compiler_flags, neff

BUNDLE_FILE, SCRIPT_FILE, VERSION_FILE = "bundle.json", "compile.sh", "compiler_version.txt"

# Names AWS's index, since the neuronx-cc package on PyPI is a placeholder.
_INSTALL = "pip install neuronx-cc from AWS's package index, see the AWS Neuron documentation"


def compiler_missing_error(
    hlo: bytes, flags: list[str], record: Mapping[str, Any], target: Target
) -> CompilerMissing:
    """Build the error for a program that cannot be compiled on this machine.

    The error carries the bundle's files.
    """
    graph = record["graph"]
    metadata = {
        "format": 1,
        "graph": graph,
        "target": str(target),
        "runs_once": "--optlevel=1" in flags,
        "record": record,
    }
    files = {
        compiler.HLO_FILE: hlo,
        compiler.FLAGS_FILE: json.dumps(flags).encode(),
        BUNDLE_FILE: (json.dumps(metadata, indent=1) + "\n").encode(),
        SCRIPT_FILE: _script(graph, target, flags).encode(),
    }
    return CompilerMissing(
        f"{target}: neuronx-cc is not installed on this machine; install it ({_INSTALL}; no device "
        "is needed) and compile again, or finish the bundles on a machine that has neuronx-cc",
        files,
        record["neuron"].get("preflight", {}),
    )


def _script(graph: str, target: Target, flags: list[str]) -> str:
    """Return a shell script that compiles the bundle on a machine without graphtrain."""
    command = ["neuronx-cc", *compiler.arguments(compiler.HLO_FILE, compiler.NEFF_FILE, flags)]
    return f"""#!/bin/sh
# Compiles the {graph} step for {target}, with flags for neuronx-cc {compiler_flags.NEWEST_VERSION}.
# Then, on a machine with graphtrain: graphtrain neuron finish DIRECTORY
# If neuronx-cc is missing: {_INSTALL}
set -e
cd "$(dirname "$0")"
neuronx-cc --version > {VERSION_FILE}
{shlex.join(command)}
"""


def finish(files: Mapping[str, bytes]) -> tuple[bytes, dict[str, Any], list[str], str]:
    """Compile a bundle, or use the NEFF that its script has produced.

    Returns:
        The NEFF, the record of the program, the flags, and the compiler's version.

    Raises:
        CompilerMissing: neuronx-cc is not installed, and the bundle contains no NEFF.
        LoweringError: the compiler rejected the program, or the bundle is incomplete.
    """
    try:
        metadata, flags = json.loads(files[BUNDLE_FILE]), json.loads(files[compiler.FLAGS_FILE])
        target, graph, record = (
            Target.parse(metadata["target"]),
            metadata["graph"],
            metadata["record"],
        )
        hlo, runs_once = files[compiler.HLO_FILE], metadata["runs_once"]
        if compiler.NEFF_FILE in files:
            files[VERSION_FILE]  # the script writes it before the NEFF
    except (KeyError, TypeError, ValueError) as error:
        raise LoweringError(f"the bundle is incomplete ({error!r}); copy it again") from None
    if compiler.NEFF_FILE in files:
        payload = files[compiler.NEFF_FILE]
        neff.check(
            payload, simulated=target.runs_on_cpu, what=f"{compiler.NEFF_FILE} of the bundle"
        )
        version = compiler.version_in(files[VERSION_FILE].decode(), VERSION_FILE)
        return payload, completed_record(record, payload, 0.0, flags, version), flags, version
    installed_compiler = compiler.find_compiler(target)
    if installed_compiler is None:
        raise compiler_missing_error(hlo, flags, record, target)
    flags = compiler_flags.flags(target, installed_compiler.version, fast=runs_once)
    payload, seconds = compiler_choice.compile_timed(
        installed_compiler, hlo, flags, graph=graph, target=target
    )
    return (
        payload,
        completed_record(record, payload, seconds, flags, installed_compiler.version),
        flags,
        installed_compiler.version,
    )


def completed_record(
    record: Mapping[str, Any], payload: bytes, seconds: float, flags: list[str], version: str
) -> dict[str, Any]:
    """Return a program's record, completed with the results of its compilation."""
    memory = dict(record["memory"])
    if neff.is_simulated(payload):
        temporary_bytes = neff.unpack(payload)[0]["temporaries"]
        memory["peak"] += temporary_bytes - memory["temporaries"]
        memory["temporaries"] = temporary_bytes
    else:
        memory["code"] = len(payload)
    compiler_record = {"compiler": version, "flags": flags}
    return {
        **record,
        "compile_seconds": round(seconds, 3),
        "memory": memory,
        "neuron": record["neuron"] | compiler_record,
    }
