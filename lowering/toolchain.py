"""Toolchain: versions and settings that change generated code."""

import os
from dataclasses import dataclass
from importlib import metadata

# Everything between the model's source and the executable.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes")
_PLATFORM_PACKAGES = {
    "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "tpu": ("libtpu",),
    "neuron": ("neuronx-cc",),
}
_PLATFORM_FLAGS = {"neuron": ("NEURON_CC_FLAGS",)}
# Where JAX finds devices and keeps its own cache, and what it prints, is not in the code it makes.
_HARMLESS = (
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
_HARMLESS_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")


@dataclass(frozen=True)
class Toolchain:
    """What compiles here, as it goes into every key."""

    versions: dict[str, str]
    environment: dict[str, str]

    @classmethod
    def here(cls, platform: str) -> "Toolchain":
        """The toolchain of this process for one platform; imports nothing it names."""
        names = _PACKAGES + _PLATFORM_PACKAGES.get(platform, ())
        flags = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", *_PLATFORM_FLAGS.get(platform, ()))
        return cls({name: v for name in names if (v := version(name))}, _environment(flags))


def version(package: str) -> str | None:
    """Of a package that is installed here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _environment(flag_variables: tuple[str, ...]) -> dict[str, str]:
    """Variables that XLA and JAX read; unknown ones count, since a needless miss costs least."""
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("JAX_") and not name.startswith(_HARMLESS)
    }
    for name in flag_variables:
        flags = [f for f in os.environ.get(name, "").split() if not f.startswith(_HARMLESS_FLAGS)]
        if flags:
            settings[name] = " ".join(flags)
    return settings
