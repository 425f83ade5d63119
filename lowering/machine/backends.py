"""Backends by platform, and machines by name: built in, or offered by installed packages.

A package offers entry points of two groups: a backend under its platform's name, and each machine
of that platform under the name that a target has. Reading the metadata of all installed packages
takes 4 to 8 ms (of 256 packages, Python 3.11), so it is read only for names that are not built in.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowering.errors import LoweringError
from lowering.machine import startup

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS, MACHINES = "graphtrain.backends", "graphtrain.machines"  # groups of entry points

# The entry points of this project itself, in pyproject.toml too.
BUILT_IN = {
    "cpu": "lowering.xla.backend",
    "cuda": "lowering.xla.backend",
    "rocm": "lowering.xla.backend",
    "tpu": "lowering.xla.backend",
    "neuron": "lowering.neuron.backend",
    "ascend": "lowering.ascend.backend",
}
_REQUIRED = {"platform": str, "memory": (int, float), "flops": Mapping}  # of a machine's table


def find_backend(platform: str, required: Iterable[str]) -> Any:
    """Return the backend of a platform; import it on first use.

    Args:
        platform: the platform of a target.
        required: names of the functions that a backend of another package must have.

    Raises:
        LoweringError: no installed package provides the platform, or its backend is incomplete.
    """
    if platform in BUILT_IN:
        startup.import_jax()
        return importlib.import_module(BUILT_IN[platform])
    return _installed_backend(platform, tuple(required))


@functools.cache
def _installed_backend(platform: str, required: tuple[str, ...]) -> Any:
    entry = find_entry_point(BACKENDS, platform)
    if entry is None:
        raise LoweringError(
            f"no installed package provides the platform {platform!r}; install the package of its "
            f"backend, which has an entry point {platform!r} in the group {BACKENDS}"
        )
    backend = _load(entry)
    missing = [name for name in required if not callable(getattr(backend, name, None))]
    if missing:
        raise LoweringError(
            f"the backend {entry.value} of {_package(entry)} has no {', '.join(missing)}; install "
            "a version of the package for this version of graphtrain"
        )
    return backend


@functools.cache
def installed_machine(name: str) -> dict[str, Any] | None:
    """Return the table of a machine that an installed package offers; None if none does.

    Raises:
        LoweringError: the table cannot be imported, or is incomplete.
    """
    entry = find_entry_point(MACHINES, name)
    if entry is None:
        return None
    table = _load(entry)
    for key, kind in _REQUIRED.items():
        if not isinstance(table, Mapping) or not isinstance(table.get(key), kind):
            raise LoweringError(
                f"the machine {name!r} of {_package(entry)} is no table with {', '.join(_REQUIRED)}"
                f" ({entry.value}); install a version of the package for this version of graphtrain"
            )
    return dict(table)


def installed_machines() -> list[str]:
    """Return the names of the machines that installed packages offer."""
    return sorted({entry.name for entry in _entry_points(MACHINES)})


def toolchain_settings(platform: str) -> tuple[dict[str, str], list[str], list[str]]:
    """Return what identifies the toolchain of a platform that is not built in.

    Returns:
        The version of the package that provides the backend, with a digest of its sources, which
        act as a compiler; further packages, and environment variables of flags, that the tables of
        its machines name ("packages", "flag_variables").
    """
    entry = find_entry_point(BACKENDS, platform)
    if entry is None:
        return {}, [], []
    tables = [
        table
        for each in _entry_points(MACHINES)
        if _package(each) == _package(entry) and (table := installed_machine(each.name))
    ]
    packages = [name for table in tables for name in table.get("packages", ())]
    versions = {
        _package(entry): getattr(entry.dist, "version", ""),
        "sources": package_digest(entry),
    }
    flags = [name for table in tables for name in table.get("flag_variables", ())]
    return versions, packages, list(dict.fromkeys(flags))


def package_digest(entry: EntryPoint) -> str:
    """Return a digest of the Python files of the top-level package that an entry point is in."""
    spec = importlib.util.find_spec(entry.module.partition(".")[0])
    directories = list(spec.submodule_search_locations or []) if spec else []
    files = [path for directory in directories for path in sorted(Path(directory).rglob("*.py"))]
    if spec is not None and not directories and spec.origin:
        files = [Path(spec.origin)]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise LoweringError(
            f"cannot import {entry.value} of {_package(entry)}: {error}; install the package again"
        ) from error


def find_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of an installed package."""
    return next((entry for entry in _entry_points(group) if entry.name == name), None)


@functools.cache
def _entry_points(group: str) -> Sequence[EntryPoint]:
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.module.partition(".")[0]
