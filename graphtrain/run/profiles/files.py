"""Files of a profile: one folder for each range of steps, in it one for each process."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from graphtrain.errors import TrainingError
from graphtrain.files import atomic_write, validate
from sharding_rules.documents import DocumentError, read_bytes, read_object

FOLDER = "profiles"
_FACTS, _PROGRAM = "profile.json", "program.hlo.txt"
_NAME = re.compile(r"(\d+)-(\d+)")
_MAX_TEXT = 1 << 30


@dataclass(frozen=True)
class ProfileFacts:
    """Facts of the profile of one process."""

    first_step: int
    last_step: int
    seconds: float  # of all steps together
    target: str
    mesh: dict[str, int]
    rank: int
    peak_bytes: int  # of a device, by the compiler


@dataclass(frozen=True)
class ProcessProfile:
    """Profile of one process, on disk."""

    path: Path
    facts: ProfileFacts

    @property
    def trace(self) -> Path:
        """File of the profiler, which xprof reads.

        Raises:
            TrainingError: there is none.
        """
        found = sorted(self.path.glob("plugins/profile/*/*.xplane.pb"))
        if not found:
            raise TrainingError(f"{self.path}: no *.xplane.pb; the profile is incomplete")
        return found[-1]

    def program_text(self) -> str:
        """Return the text of the compiled training step.

        Raises:
            TrainingError: it cannot be read.
        """
        path = self.path / _PROGRAM
        try:
            return read_bytes(path, _MAX_TEXT).decode()
        except (OSError, DocumentError, UnicodeDecodeError) as error:
            raise TrainingError(f"{path}: cannot be read: {error}") from None


def write_facts(path: Path, facts: ProfileFacts, program_text: str) -> None:
    """Complete the profile of a process; without these files it does not count.

    Raises:
        OSError: they cannot be written.
    """
    (path / _PROGRAM).write_text(program_text)
    with atomic_write(path / _FACTS) as file:
        file.write(json.dumps(asdict(facts), indent=2).encode())


def profile_names(directory: Path) -> list[str]:
    """Return the names of the profiles of a run, "FIRST-LAST", in order of the steps."""
    folder = directory / FOLDER
    names = [path.name for path in folder.glob("*-*") if _NAME.fullmatch(path.name)]
    return sorted(names, key=lambda name: tuple(map(int, name.split("-"))))


def read_profile(directory: Path, name: str | None = None) -> list[ProcessProfile]:
    """Return the profiles of all processes, by rank.

    Args:
        directory: Directory of a run.
        name: Steps of the profile, "FIRST-LAST"; None for the last one.

    Raises:
        TrainingError: there is no such profile, or it is incomplete or damaged.
    """
    names = profile_names(directory)
    if not names:
        raise TrainingError(
            f'{directory} has no profile; set run.profile, for example "100:105", or send SIGUSR2 '
            "to a process of the run"
        )
    chosen = names[-1] if name is None else name.replace(":", "-")
    if chosen not in names:
        raise TrainingError(f"{directory} has no profile {chosen}; it has {', '.join(names)}")
    processes = []
    for path in (directory / FOLDER / chosen).glob("rank-*/" + _FACTS):
        try:
            facts = validate(ProfileFacts, read_object(path))
        except (OSError, DocumentError) as error:
            raise TrainingError(f"{path}: cannot be read: {error}") from None
        processes.append(ProcessProfile(path.parent, facts))
    if not processes:
        raise TrainingError(f"{directory / FOLDER / chosen}: no process has completed its profile")
    return sorted(processes, key=lambda one: one.facts.rank)
