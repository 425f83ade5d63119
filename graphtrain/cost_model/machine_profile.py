"""Profiles of machines: what was measured of their products, memory, functions and collectives.

`graphtrain doctor --measure` writes them; plans for the same machine read them. They change only
estimates, no compiled program.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from graphtrain.errors import PlanError
from graphtrain.files import atomic_write, validate
from lowering.machine import host
from lowering.machine.machine_tables import VARIABLE
from lowering.machine.toolchain import version
from sharding_rules.documents import DocumentError, read_object

FILE = "machine-profiles.json"
_VERSION = 4
BUSY = 0.1  # share of the cores that others may use; above it, times are theirs, too
SLOW = 0.1  # share of runs with slower cores; above it, a plan says so
# Bytes from which on the arrays of an operation are taken to come from memory: they were written a
# layer or a step ago, while a measurement that repeats one operation finds them in the cache.
CACHED_BYTES = 1 << 18
RUNS = 5  # of every measurement, of which the median counts
_Positive = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, lt=2**50)]


@dataclass(frozen=True)
class Measured:
    """One measured number: the median of several runs."""

    seconds: _Positive  # of one execution; of the processor on a CPU, else by the clock
    spread: _Share  # of the runs: (most - least) / median


@dataclass(frozen=True)
class MeasuredProduct(Measured):
    """A matrix product: `batch` products of rows x summed with summed x columns."""

    dtype: str  # of the operands, as in HLO: bf16, f32, s8
    batch: _Count
    rows: _Count
    summed: _Count
    columns: _Count

    @property
    def flops(self) -> float:
        """Operations; a multiply-add counts as two."""
        return 2.0 * self.batch * self.rows * self.summed * self.columns


@dataclass(frozen=True)
class MeasuredStream(Measured):
    """A loop that reads and writes memory and computes next to nothing."""

    kind: str  # copy, triad
    bytes: _Count  # read and written


@dataclass(frozen=True)
class MeasuredFunction(Measured):
    """A loop that computes one function of each element."""

    kind: str  # as in lowering.hlo.loop_work
    elements: _Count


@dataclass(frozen=True)
class MeasuredCollective(Measured):
    """A collective over all of some devices; seconds are those of one device."""

    op: str
    devices: _Count
    bytes: _Count  # as Collective.bytes


@dataclass(frozen=True)
class MachineProfile:
    """Everything that was measured of one machine, with when and on what."""

    machine: str  # cpu, or the name of the device as JAX reports it
    processor: str
    features: str  # digest of the instruction set
    cores: _Count
    versions: Mapping[str, str]  # of jax and jaxlib
    measured_at: str  # UTC
    busy: _Share | None  # share of the cores that others used meanwhile; None: unknown
    products: tuple[MeasuredProduct, ...]
    memory: tuple[MeasuredStream, ...]
    functions: tuple[MeasuredFunction, ...]
    overheads: Mapping[str, Measured]  # launch, iteration, step, array
    collectives: tuple[MeasuredCollective, ...]
    slow: _Share = 0.0  # share of the runs in which a core was slower than at its best

    @property
    def source(self) -> str:
        """Source of its numbers, in words."""
        busy = ""
        if self.busy is None:
            busy = ", without knowing what others used of the cores"
        elif self.busy > BUSY:
            busy = f", while others used {self.busy:.0%} of the cores"
        if self.slow > SLOW:
            busy += f", with slower cores in {self.slow:.0%} of the runs"
        return f"measured on {self.measured_at[:10]} with jax {self.versions['jax']}{busy}"

    @property
    def identity(self) -> tuple[Any, ...]:
        """Properties that must be equal for a profile to stand for a machine."""
        return self.machine, self.processor, self.features, self.cores, self.versions


@dataclass(frozen=True)
class _File:
    """The file: profiles of several machines."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    graphtrain_machine_profiles: int
    profiles: tuple[MachineProfile, ...]
    sha256: str = ""  # of the profiles


def this_machine(**measured: Any) -> MachineProfile:
    """Return a profile of this machine's CPU with what was measured; by default nothing."""
    about = host.processor()
    empty: dict[str, Any] = {
        "measured_at": "", "busy": 0.0, "products": (), "memory": (), "functions": (),
        "overheads": {}, "collectives": (),
    }  # fmt: skip
    return MachineProfile(
        machine="cpu",
        processor=about["name"],
        features=about["features"],
        cores=host.usable_cores(),
        versions={name: version(name) or "" for name in ("jax", "jaxlib")},
        **(empty | measured),
    )


def profiles_path() -> Path:
    """Return the file of profiles: beside the user's targets.toml, else in this directory."""
    named = os.environ.get(VARIABLE)
    return Path(named).parent / FILE if named else Path(FILE)


def read_profiles(path: Path) -> tuple[MachineProfile, ...]:
    """Return the profiles in a file; none if there is no file.

    Raises:
        PlanError: the file cannot be read, or is not as store_profile() writes it.
    """
    if not path.exists():
        return ()
    try:
        document = read_object(path)
        file = validate(_File, document)
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except DocumentError as error:
        raise PlanError(
            f"{path}: is no file of machine profiles: {str(error).partition(';')[0]}; remove it, "
            "and run graphtrain doctor --measure"
        ) from None
    if file.graphtrain_machine_profiles != _VERSION:
        raise PlanError(
            f"{path}: its format has version {file.graphtrain_machine_profiles}, this reads "
            f"{_VERSION}; remove it, and run graphtrain doctor --measure"
        )
    if file.sha256 != _digest(document["profiles"]):
        raise PlanError(
            f"{path}: does not match its checksum (sha256), so its numbers are not those that were "
            "measured; remove it, and run graphtrain doctor --measure"
        )
    return file.profiles


def _digest(profiles: Any) -> str:
    return hashlib.sha256(json.dumps(profiles, sort_keys=True).encode()).hexdigest()


def store_profile(path: Path, profile: MachineProfile) -> None:
    """Add a profile to a file, in place of an earlier one of the same machine.

    Machines that share the folder do so one after the other.

    Raises:
        PlanError: the file exists and is no file of profiles.
        OSError: it cannot be written.
    """
    with _locked(path):
        others = [one for one in read_profiles(path) if one.identity != profile.identity]
        profiles = [asdict(one) for one in (*others, profile)]
        about = asdict(_File(_VERSION, (), _digest(profiles)))
        text = json.dumps(about | {"profiles": profiles}, indent=1)
        with atomic_write(path) as file:
            file.write(f"{text}\n".encode())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which stands beside it, because a rename replaces the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_path(path).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def check_writable(path: Path) -> None:
    """Check that store_profile() may write a file, without writing anything.

    Raises:
        PlanError: it may not.
    """
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    lock = _lock_path(path)
    if not all(os.access(one, os.W_OK) for one in (folder, *([lock] if lock.exists() else []))):
        raise PlanError(f"{path}: cannot be written: no permission to write in {folder}")


def profile_of_this_machine(path: Path) -> tuple[MachineProfile | None, str]:
    """Return the profile of this machine's CPU, or None and the reason why there is none.

    A profile of another processor, another number of cores or another jax is not used.

    Raises:
        PlanError: the file cannot be read.
    """
    here, profiles = this_machine(), read_profiles(path)
    for one in profiles:
        if one.identity == here.identity:
            return one, ""
    if not profiles:
        return None, "this machine has no profile"
    most_alike = max(reversed(profiles), key=lambda one: _equal_properties(one, here))
    return None, f"the profile in {path} is of {_difference(most_alike, here)}"


def _equal_properties(one: MachineProfile, other: MachineProfile) -> int:
    """Return in how many properties of their identity two profiles agree."""
    return sum(a == b for a, b in zip(one.identity, other.identity, strict=True))


def _difference(other: MachineProfile, here: MachineProfile) -> str:
    """Return in what a profile differs from this machine."""
    if other.machine != here.machine or other.processor != here.processor:
        return f"another processor: {other.processor}, this is {here.processor}"
    if other.features != here.features:
        return "a processor with other instructions"
    if other.cores != here.cores:
        return f"{other.cores} cores, this process has {here.cores}"
    return f"jax {other.versions.get('jax')}, this is {here.versions['jax']}"
