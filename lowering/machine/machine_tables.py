"""Tables of machines by name: built in, of the user's file, or of an installed package."""

import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowering.errors import LoweringError
from lowering.machine import backends
from sharding_rules.documents import read_toml

VARIABLE, _FILE = "GRAPHTRAIN_TARGETS", "targets.toml"
_BUILT_IN = Path(__file__).parent / "topologies.toml"
# What only estimates read. All else can change programs, also the memory: by the chunks of a loss.
_ESTIMATES = {"flops", "link", "host_link", "network", "achieved", "like", "source", "slice",
              "shapes", "file", "file_numbers"}  # fmt: skip
# Words for a kind of machine, which people give in place of the model: platforms of its models.
_KINDS = {
    "gpu": ("cuda", "rocm"),
    "cuda": ("cuda",),
    "nvidia": ("cuda",),
    "rocm": ("rocm",),
    "amd": ("rocm",),
    "tpu": ("tpu",),
    "neuron": ("neuron",),
    "trainium": ("neuron",),
}


def machines() -> list[str]:
    """Return the names of all machines that can be a target."""
    return ["cpu", *tables(), *backends.installed_machines()]


def specification(machine: str) -> dict[str, Any] | None:
    """Return the table of a machine; None for an unknown machine."""
    table = tables().get(machine)
    return backends.installed_machine(machine) if table is None else table


def suggestion(machine: str) -> str:
    """Return a hint for a machine that is not known."""
    names = machines()
    if platforms := _KINDS.get(machine.lower()):
        of_kind = [one for one, table in tables().items() if table["platform"] in platforms]
        return f"name the model, for example {of_kind[0]}; known: {', '.join(of_kind)}"
    if close_matches := difflib.get_close_matches(machine, names, n=1):
        return f"did you mean {close_matches[0]}?"
    return (
        f"known machines: {', '.join(names)}; a machine of another backend is known once its "
        f"package is installed, with an entry point {machine!r} in the group {backends.MACHINES}"
    )


def tables() -> Mapping[str, Any]:
    """Return the tables of machines by name: the built-in ones, and those of the user's file.

    The file is $GRAPHTRAIN_TARGETS, else targets.toml in the current directory. Every process reads
    it, also those that compile, which inherit both from the process that starts them.

    Raises:
        LoweringError: the file cannot be read, or describes a machine wrongly.
    """
    named = os.environ.get(VARIABLE)
    file = named or _FILE
    try:
        state = os.stat(file)
    except (OSError, ValueError) as error:
        if named:
            reason = getattr(error, "strerror", None) or "no file can have this name"
            raise LoweringError(f"{VARIABLE} = {named}: {reason}") from None
        return built_in()
    return _with_file(os.path.abspath(file), file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=1)
def _with_file(path: str, shown: str, modified: int, size: int) -> Mapping[str, Any]:
    """Read one version of the user's file, which its time and size identify."""
    from lowering.machine.user_machines import with_machines_of  # imports pydantic

    return with_machines_of(Path(path), shown, built_in())


@functools.cache
def built_in() -> Mapping[str, Any]:
    """Return the tables of the built-in machines by name."""
    return read_toml(_BUILT_IN)


def program_changes(machine: str) -> dict[str, Any]:
    """Return what the user's file says of a machine that can change compiled programs.

    Empty if it only says what estimates read. The sources of graphtrain, of which the built-in
    tables are a part, are in the keys of programs already.
    """
    table = tables().get(machine)
    if table is None or "file" not in table:
        return {}
    settings = _program_settings(table)
    known = built_in().get(machine)
    return {} if known is not None and settings == _program_settings(known) else settings


def _program_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a machine's table that is not for estimates alone."""
    unread = _ESTIMATES | ({"group"} if "per_host" in table else set())
    if table["platform"] != "cuda":
        unread = unread | {"bandwidth"}
    return {name: value for name, value in table.items() if name not in unread}
