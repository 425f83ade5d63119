"""Checks of what this machine can compile for and run on, with remedies for what is missing."""

import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lowering.ascend import installation
from lowering.machine import host
from lowering.machine.extras import install_command, is_installed
from lowering.machine.toolchain import Toolchain


@dataclass(frozen=True)
class MachineFinding:
    """Result of one check."""

    subject: str
    state: str
    ok: bool
    remedy: str = ""  # command that fixes it; empty if there is nothing to fix


def run_checks(cache: Path) -> list[MachineFinding]:
    """Check the interpreter, the packages, the targets, the memory and the cache directory.

    Changes nothing.
    """
    return [_python(), *_packages(), *_targets(), _memory(), _store(cache)]


def _python() -> MachineFinding:
    return MachineFinding("python", platform.python_version(), True)


def _packages() -> list[MachineFinding]:
    versions = Toolchain.current("cpu").versions
    jax, jaxlib = versions.get("jax", ""), versions.get("jaxlib", "")
    is_matching = jax.split(".")[:2] == jaxlib.split(".")[:2]
    remedy = "" if is_matching else f"pip install jaxlib=={jax}"
    findings = [MachineFinding("jax and jaxlib", f"{jax} and {jaxlib}", is_matching, remedy)]
    for name in ("flax", "optax", "orbax-checkpoint", "grain", "sentencepiece"):
        try:
            findings.append(MachineFinding(name, metadata.version(name), True))
        except metadata.PackageNotFoundError:
            findings.append(MachineFinding(name, "not installed", False, "pip install graphtrain"))
    return findings


def _targets() -> list[MachineFinding]:
    processor = host.processor()
    cpu = MachineFinding(
        "target cpu",
        f"compiles and runs: {processor['name']}, {processor['architecture']}",
        True,
    )
    return [
        cpu,
        _accelerator("cuda", "jax_cuda13_plugin", "gpu"),
        _accelerator("tpu", "libtpu", "tpu"),
        _neuron(),
        _ascend(),
    ]


def _accelerator(name: str, module: str, extra: str) -> MachineFinding:
    if is_installed(module):
        return MachineFinding(
            f"target {name}", "compiles; runs on a machine that has the devices", True
        )
    return MachineFinding(
        f"target {name}", f"estimates only; to compile, {install_command(extra)}", True
    )


def _ascend() -> MachineFinding:
    if not installation.has_mindspore():
        state = f"to run, {installation.INSTALL_COMMAND}"
    else:
        state = (
            "runs"
            if installation.has_cann()
            else "runs on a machine with CANN; ascend-cpu runs on this machine"
        )
    return MachineFinding("target ascend", f"compiles; {state}", True)


def _neuron() -> MachineFinding:
    compiler = shutil.which("neuronx-cc")
    state = (
        f"compiles: {compiler}"
        if compiler
        else "writes bundles, because neuronx-cc is not installed"
    )
    return MachineFinding("target neuron", f"{state}; neuron-sim compiles and runs", True)


def _memory() -> MachineFinding:
    return MachineFinding("memory", f"{host.memory_bytes() / 1e9:.1f} GB", True)


def _store(cache: Path) -> MachineFinding:
    directory = cache if cache.exists() else cache.absolute().parent
    if not directory.exists():
        return MachineFinding(
            "cache", f"{directory} does not exist", False, f"mkdir -p {directory}"
        )
    free = shutil.disk_usage(directory).free
    enough = free > 1e9
    return MachineFinding(
        "cache",
        f"{cache}, {free / 1e9:.1f} GB free",
        enough,
        "" if enough else f"graphtrain cache gc --cache {cache}",
    )
