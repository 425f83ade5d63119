"""Toolchain: versions and settings of the compiler that change generated code."""

import hashlib
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lowering.errors import LoweringError
from lowering.machine import backends

# Packages between the model's source and the executable.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes")
_PLATFORM_PACKAGES = {
    "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "tpu": ("libtpu",),
    "neuron": ("neuronx-cc",),
}
_PLATFORM_FLAGS = {"neuron": ("NEURON_CC_FLAGS",)}
# JAX settings of devices, its own cache and logging, which do not change generated code.
_IGNORED_VARIABLES = (
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_COORDINATOR_",
    "JAX_COMPILATION_CACHE",
    "JAX_PERSISTENT_CACHE",
    "JAX_ENABLE_COMPILATION_CACHE",
    "JAX_LOG",
    "JAX_DEBUG_LOG",
    "JAX_TRACEBACK",
)
_IGNORED_FLAGS = (
    "--xla_dump",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_dump_autotune_results_to",
)
# Flags that name a file whose content changes generated code; its path does not.
_FILES = ("--xla_gpu_load_autotune_results_from",)


@dataclass(frozen=True)
class Toolchain:
    """Compiler versions and environment of this process, part of every cache key."""

    versions: dict[str, str]
    environment: dict[str, str]

    @classmethod
    def current(cls, platform: str) -> "Toolchain":
        """Return the toolchain of this process for one platform, without importing its packages."""
        names = _PACKAGES + _PLATFORM_PACKAGES.get(platform, ())
        flags = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", *_PLATFORM_FLAGS.get(platform, ()))
        backend_versions: dict[str, str] = {}
        if platform not in backends.BUILT_IN:
            backend_versions, packages, variables = backends.toolchain_settings(platform)
            names, flags = (*names, *packages), (*flags, *variables)
        versions = backend_versions | {name: v for name in names if (v := version(name))}
        return cls(versions, _environment(flags))


def version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _environment(flag_variables: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables of XLA and JAX that may change generated code.

    Unknown JAX variables are included: a false hit is worse than a needless cache miss.
    """
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("JAX_") and not name.startswith(_IGNORED_VARIABLES)
    }
    for name in flag_variables:
        flags = [f for f in os.environ.get(name, "").split() if not f.startswith(_IGNORED_FLAGS)]
        if flags:
            settings[name] = " ".join(map(_with_file_digest, flags))
    return settings


def _with_file_digest(flag: str) -> str:
    """Return a flag with the path of its file replaced by the digest of the content.

    Raises:
        LoweringError: the file cannot be read; XLA would only report this while it compiles.
    """
    name, _, path = flag.partition("=")
    if name not in _FILES:
        return flag
    try:
        return f"{name}={hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
    except OSError as error:
        raise LoweringError(f"XLA_FLAGS: cannot read {path}: {error.strerror}") from None
