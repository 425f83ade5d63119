"""JAX's plugin for Neuron: what it extracts, and what it takes to make it extract.

While it extracts, the plugin compiles nothing and its programs return zeros; it leaves every
program that it is given in the persistent cache, under a key that only it can make.
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

# Source: environment of neuron_parallel_compile and of other launchers of an extraction.
_EXTRACTION = {
    "NEURON_EXTRACT_GRAPHS_ONLY": "1",
    "NEURON_PARALLEL_COMPILE": "1",
    "NEURON_FALL_BACK_TO_NULL_NEFF": "1",
    "NEURON_FORCE_PJRT_PLUGIN_REGISTRATION": "1",  # on machines without a Neuron device too
}


def environment(root: Path) -> dict[str, str]:
    """Ours, with what has the plugin extract into a cache.

    Raises:
        LoweringError: NEURON_CC_FLAGS name another cache, which the plugin would prefer.
    """
    asked = shlex.split(os.environ.get("NEURON_CC_FLAGS", ""))
    elsewhere = [flag for flag in asked if flag.partition("=")[0] in ("--cache_dir", "--no_cache")]
    if elsewhere:
        raise LoweringError(
            f"NEURON_CC_FLAGS has {elsewhere[0]}, which the plugin obeys before "
            f"NEURON_COMPILE_CACHE_URL={root}; take it out of NEURON_CC_FLAGS"
        )
    return os.environ | _EXTRACTION | {"NEURON_COMPILE_CACHE_URL": str(root.resolve())}


def extract(command: Sequence[str], root: Path, *, ignore_failure: bool) -> None:
    """Run a command that trains for a few steps, for the programs it gives to the plugin.

    Raises:
        LoweringError: it cannot be run, or failed.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix="graphtrain-neuron-") as unused:
        # AWS's tool names a file for its plugin to write the cache's path to; here that is known.
        told = environment(root) | {"NEURON_PARALLEL_COMPILE_CACHE_PATH_LOG": unused.name}
        try:
            status = subprocess.run(list(command), env=told).returncode
        except OSError as error:
            raise LoweringError(f"cannot run {shlex.join(command)}: {error.strerror}") from None
    if status and not ignore_failure:
        raise LoweringError(
            f"{shlex.join(command)} ended with status {status} while its graphs were extracted; "
            "results are zeros meanwhile, so have it skip what depends on them (it sees "
            "NEURON_EXTRACT_GRAPHS_ONLY=1), or compile what it had left with --ignore-failure"
        )


def check(target: Target) -> None:
    """Refuse to go on where the plugin is not installed; looks, and imports nothing.

    Raises:
        LoweringError: says what to install.
    """
    if importlib.util.find_spec("libneuronxla") is None:
        raise LoweringError(
            f"{target}: JAX's plugin for Neuron is not installed here; install jax-neuronx and "
            "libneuronxla from AWS's index, which the AWS Neuron documentation names. Without it, "
            "graphtrain compile makes the programs that graphtrain run loads"
        )


def devices(target: Target) -> list:
    """The plugin's devices, for as many as the target has.

    Raises:
        LoweringError: the plugin is not here, or shows another number.
    """
    import jax

    check(target)
    jax.config.update("jax_platforms", "neuron,cpu")
    try:
        found = jax.devices("neuron")
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise LoweringError(f"{target}: JAX's plugin for Neuron does not begin ({said})") from None
    if len(found) != target.devices:
        raise LoweringError(
            f"{target} has {target.devices} devices, and JAX's plugin for Neuron shows "
            f"{len(found)}; programs for another number are others. NEURON_RT_VISIBLE_CORES or "
            "NEURON_PJRT_PROCESSES_NUM_DEVICES says how many it shows"
        )
    return found


def give(lowered: Lowered) -> None:
    """Give a program to the plugin, which puts it into the cache while it extracts.

    Raises:
        LoweringError: it does not extract, and would compile one program after the other.
    """
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") != "1":
        raise LoweringError(
            "NEURON_EXTRACT_GRAPHS_ONLY is not 1, so the plugin would compile; run this below "
            "graphtrain neuron-cache collect DIR -- COMMAND"
        )
    lowered.handle.compile()
