"""Extraction of programs with JAX's Neuron plugin.

While extracting, the plugin compiles nothing and its programs return zeros; it stores every program
that it receives in the persistent cache, under a key that only the plugin can compute.
"""

import importlib.util
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lowering.errors import LoweringError
from lowering.lowered import Lowered
from lowering.machine.target import Target

# Source: the environment that neuron_parallel_compile and other launchers set for an extraction.
_EXTRACTION = {
    "NEURON_EXTRACT_GRAPHS_ONLY": "1",
    "NEURON_PARALLEL_COMPILE": "1",
    "NEURON_FALL_BACK_TO_NULL_NEFF": "1",
    "NEURON_FORCE_PJRT_PLUGIN_REGISTRATION": "1",  # on machines without a Neuron device too
}


def extraction_environment(root: Path) -> dict[str, str]:
    """Return this process's environment, with variables that make the plugin extract into a cache.

    Raises:
        LoweringError: NEURON_CC_FLAGS selects another cache, which the plugin would use instead.
    """
    flags = shlex.split(os.environ.get("NEURON_CC_FLAGS", ""))
    cache_flags = [
        flag for flag in flags if flag.partition("=")[0] in ("--cache_dir", "--no_cache")
    ]
    if cache_flags:
        raise LoweringError(
            f"NEURON_CC_FLAGS contains {cache_flags[0]}, which takes precedence over "
            f"NEURON_COMPILE_CACHE_URL={root} in the plugin; remove it from NEURON_CC_FLAGS"
        )
    return os.environ | _EXTRACTION | {"NEURON_COMPILE_CACHE_URL": str(root.resolve())}


def extract(command: Sequence[str], root: Path, *, ignore_failure: bool) -> None:
    """Run a command that trains for a few steps, so that the plugin stores its programs.

    Raises:
        LoweringError: the command cannot be run, or failed.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix="graphtrain-neuron-") as cache_path_log:
        # AWS's tool passes a file for the plugin to write the cache's path to. Here the path is
        # known, so the file is not read.
        env = extraction_environment(root) | {
            "NEURON_PARALLEL_COMPILE_CACHE_PATH_LOG": cache_path_log.name
        }
        try:
            status = subprocess.run(list(command), env=env).returncode
        except OSError as error:
            raise LoweringError(f"cannot run {shlex.join(command)}: {error.strerror}") from None
    if status and not ignore_failure:
        raise LoweringError(
            f"{shlex.join(command)} exited with status {status} while its graphs were extracted; "
            "all results are zeros during extraction, so let it skip code that depends on them "
            "(if NEURON_EXTRACT_GRAPHS_ONLY is 1), or pass --ignore-failure to compile the graphs "
            "extracted so far"
        )


def check_installed(target: Target) -> None:
    """Check that the plugin is installed, without importing it.

    Raises:
        LoweringError: the plugin is not installed; the message names the packages.
    """
    if importlib.util.find_spec("libneuronxla") is None:
        raise LoweringError(
            f"{target}: JAX's Neuron plugin is not installed on this machine; install jax-neuronx "
            "and libneuronxla from AWS's package index, see the AWS Neuron documentation. "
            "graphtrain compile and graphtrain run do not need the plugin"
        )


def devices(target: Target) -> list:
    """Return the plugin's devices; their number must be the target's.

    Raises:
        LoweringError: the plugin is not installed, fails to start, or has another number of
            devices.
    """
    import jax

    check_installed(target)
    jax.config.update("jax_platforms", "neuron,cpu")
    try:
        neuron_devices = jax.devices("neuron")
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise LoweringError(f"{target}: JAX's Neuron plugin failed to start ({reason})") from None
    if len(neuron_devices) != target.devices:
        raise LoweringError(
            f"{target} has {target.devices} devices, but JAX's Neuron plugin reports "
            f"{len(neuron_devices)}, and programs depend on the number of devices; set "
            "NEURON_RT_VISIBLE_CORES or NEURON_PJRT_PROCESSES_NUM_DEVICES, or change --target"
        )
    return neuron_devices


def extract_program(lowered: Lowered) -> None:
    """Pass a program to the plugin, which stores it in the cache while extracting.

    Raises:
        LoweringError: the plugin is not extracting, and would compile one program after the other.
    """
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") != "1":
        raise LoweringError(
            "NEURON_EXTRACT_GRAPHS_ONLY is not 1, so the plugin would compile instead of "
            "extracting; run this command through graphtrain neuron collect DIR -- COMMAND"
        )
    lowered.handle.compile()
