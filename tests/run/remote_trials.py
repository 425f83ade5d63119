"""Runs whose checkpoints go to an S3 server, and are killed at random moments."""

import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from places import Place, meeting_address
from storage import Network, s3_server

from graphtrain.checkpoints.arrays import restore_array
from graphtrain.checkpoints.info import read_checkpoint_info
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.upload_process import MODULE

URL = "s3://runs/one"
_SLOW = """
import time
from graphtrain.data.batches import loader
read = loader.Loader.__next__

def read_slowly(self):
    time.sleep(STEP_SECONDS)
    return read(self)

loader.Loader.__next__ = read_slowly
from graphtrain.cli import main
main()
"""


def slow_program(step_seconds: float) -> str:
    """The command, whose steps take so much longer, as those of a larger model."""
    return _SLOW.replace("STEP_SECONDS", str(step_seconds))


def arrays(directory: Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint in a directory of checkpoints."""
    paths = read_checkpoint_info(directory, step).arrays
    return {path: restore_array(directory, step, path) for path in paths}


def is_equal(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(
        one.dtype == second[path].dtype and one.tobytes() == second[path].tobytes()
        for path, one in first.items()
    )


def uploaders(run: str) -> list[str]:
    """Ids of the processes that upload checkpoints of a run."""
    # Lines of any length: readline, which pytest imports, sets COLUMNS.
    found = subprocess.run(
        ["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True
    )
    lines = [line for line in found.stdout.splitlines() if MODULE in line and f'"{run}"' in line]
    return [line.split()[0] for line in lines]


class Server:
    """An S3 server that can be killed and started again, behind a network."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.url = directory, ""
        self._context = s3_server(directory)

    def start(self) -> str:
        self._context = s3_server(self.directory)
        self.url = self._context.__enter__()
        return self.url

    def kill(self) -> None:
        self._context.__exit__(None, None, None)


@contextmanager
def serving(directory: Path) -> Iterator[Server]:
    server = Server(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass
class Trial:
    """A run that is killed again and again.

    Args:
        place: Where it trains, and a run without interruptions has trained into `reference`.
        server: The S3 server.
        network: The network before it, which the run uses.
        words: More words of `graphtrain run`.
        seed: Of the moments.
        step_seconds: Seconds that a step takes longer, so that a run is killed before its end.
        hosts: Number of processes; several share no disk, and some lose theirs with a kill.
    """

    place: Place
    server: Server
    network: Network
    words: Sequence[str]
    seed: int = 0
    hosts: int = 1
    step_seconds: float = 0.04
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._expected: dict[int, Mapping[str, np.ndarray]] = {}

    def start(self, directory: str = "run") -> list[subprocess.Popen[str]]:
        """Begin the processes of the run; they train in `directory`, `directory`1, ..."""
        meeting = ["--coordinator", meeting_address(), "--processes", str(self.hosts), "--rank"]
        started = []
        for rank, name in enumerate(self._names(directory)):
            words = ["--set", f"run.directory={name}", "--set", f"run.checkpoints.remote={URL}"]
            if self.hosts > 1:
                words += ["--set", f"run.checkpoints.local=disk{rank}", *meeting, str(rank)]
            words = ["run", "config.toml", *words, *self.words]
            program = slow_program(self.step_seconds)
            started.append(self.place.start_python("-c", program, *words))
        return started

    def _names(self, directory: str = "run") -> list[str]:
        """Return the directories of the run, of each host."""
        return [f"{directory}{rank or ''}" for rank in range(self.hosts)]

    def _uploaders(self) -> list[str]:
        return [process for name in self._names() for process in uploaders(name)]

    def kill_trainer(self, seconds: float) -> None:
        """Start the run, and kill it at a random moment after its first step or first upload."""
        processes = self._start_until(upload=self._random.random() < 0.75)
        time.sleep(self._random.random() * seconds)
        self.seen["killed while an uploader ran"] += bool(self._uploaders())
        self._kill(processes)
        deadline = time.monotonic() + 10
        while self._uploaders():  # it ends with the run
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for rank in range(self.hosts if self.hosts > 1 and self._last_upload() else 0):
            if self._random.random() < 0.4:
                self._lose_disk(rank)
                self.seen["disk lost"] += 1

    def _lose_disk(self, rank: int) -> None:
        shutil.rmtree(self.place.path / f"disk{rank}", ignore_errors=True)

    def kill_server(self, seconds: float) -> None:
        """Kill the server while the run trains; start it again after some seconds."""
        processes = self._start_until(upload=False)
        time.sleep(self._random.random() * seconds)
        self.server.kill()
        self.seen["server killed"] += 1
        time.sleep(self._random.random() * seconds)
        self.network.address = self.server.start().removeprefix("http://")
        self._kill(processes)

    def _start_until(self, *, upload: bool) -> list[subprocess.Popen[str]]:
        """Start the run, and return when it has taken a step or, also, uploaded a checkpoint."""
        before, began = self.place.journal(), time.time()
        processes = self.start()
        while all(process.poll() is None for process in processes):
            has_trained = self.place.journal() not in ([], before)
            if has_trained and (not upload or self._has_uploaded(began)):
                break
            time.sleep(0.02)
        return processes

    def _has_uploaded(self, began: float) -> bool:
        return self._last_upload() > began

    def _last_upload(self) -> float:
        """Return when the last manifest was written; 0 if there is none."""
        folder = self.server.directory / URL.removeprefix("s3://") / "v1/steps"
        found = [path.stat().st_mtime for path in folder.glob("*.json")]
        return max(found, default=0.0)

    def _kill(self, processes: list[subprocess.Popen[str]]) -> None:
        self.seen["killed"] += all(process.poll() is None for process in processes)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate()

    def check(self) -> None:
        """Every step that is listed as whole is so, bit for bit."""
        remote = RemoteCheckpoints(URL, self.server.url)
        for step in remote.steps():
            with tempfile.TemporaryDirectory() as temporary:
                remote.download(step, Path(temporary))
                found = arrays(Path(temporary) / "checkpoints", step)
            self.seen["wrong"] += not is_equal(found, self._reference(step))
            self.seen["restored"] += 1

    def finish(self) -> str:
        """Complete the run in another directory, as after the loss of a machine; what it said."""
        shutil.rmtree(self.place.path / "run")
        for rank in range(self.hosts):
            self._lose_disk(rank)
        processes = self.start("elsewhere")
        told = ["".join(process.communicate(timeout=300)) for process in processes]
        assert not any(process.returncode for process in processes), told
        return told[0]

    def _reference(self, step: int) -> Mapping[str, np.ndarray]:
        if step not in self._expected:
            path = self.place.path / "reference/checkpoints"
            self._expected[step] = arrays(path, step)
        return self._expected[step]
