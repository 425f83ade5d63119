"""One run in two processes, each with a disk of its own for checkpoints, as two hosts have."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from places import Place, furnish, meeting_address
from remote_trials import arrays, is_equal, serving, uploaders
from storage import credentials, failing

from graphtrain.checkpoints.host_tier import HostTier

# Weights are sharded over both processes: each piece is on one of them.
SHARDED = ["--target", "cpu:2x2", "--set", "program.mesh.fsdp=4", "--set", "program.mesh.data=1"]


@pytest.fixture(scope="module")
def prepared(compiled, tmp_path_factory, corpus) -> Place:
    path = tmp_path_factory.mktemp("two hosts")
    furnish(path, corpus)
    place = Place(path, compiled)
    place.command("compile", "config.toml", *SHARDED)
    return place


@pytest.fixture
def hosts(place: Place, prepared: Place, tmp_path: Path) -> "Hosts":
    return Hosts(place, tmp_path)


class Hosts:
    """Two hosts, with the directory of the run and the place of their disks."""

    def __init__(self, place: Place, path: Path) -> None:
        self.place, self.path = place, path

    def disk(self, rank: int) -> Path:
        return self.path / f"disk-{rank}"

    def start(self, *words: str) -> list[subprocess.Popen[str]]:
        """Start both; RANK in a word is the rank of the process."""
        meeting = ["--coordinator", meeting_address(), "--processes", "2", "--rank"]
        return [
            self.place.start(
                "run", "config.toml", *(word.replace("RANK", str(rank)) for word in words),
                "--set", f"run.checkpoints.local={self.disk(rank)}", *meeting, str(rank),
            )
            for rank in (0, 1)
        ]  # fmt: skip

    def run(self, *words: str, status: int = 0) -> str:
        """Run both to their end; return what was said."""
        both = self.start(*words)
        told = ["\n".join(process.communicate(timeout=200)) for process in both]
        assert [process.returncode for process in both] == [status] * 2, told
        return "\n".join(told)

    def kill_at(self, step: int, *words: str) -> str:
        """Kill both when the journal has a step; return what was said."""
        both = self.start(*words)
        deadline = time.monotonic() + 100
        while not any(number >= step for number, _, _ in self.place.curve()):
            assert time.monotonic() < deadline and all(one.poll() is None for one in both)
            time.sleep(0.02)
        for process in both:
            os.kill(process.pid, signal.SIGKILL)
        return "\n".join(word for process in both for word in process.communicate())

    def reference(self) -> list[tuple[int, float, float]]:
        """Train on one disk, without an interruption; return the curve."""
        meeting = ["--coordinator", meeting_address(), "--processes", "2", "--rank"]
        name = ["--set", "run.directory=reference"]
        both = [self.place.start("run", "config.toml", *SHARDED, *name, *meeting, str(rank))
                for rank in (0, 1)]  # fmt: skip
        for process in both:
            process.communicate(timeout=200)
        return self.place.curve("reference")


def flip_byte(part: Path) -> None:
    piece = next(path for path in sorted(part.glob("pieces/*/*")) if path.stat().st_size)
    content = bytearray(piece.read_bytes())
    content[0] ^= 1
    piece.write_bytes(content)


def test_what_one_host_lost_is_restored_from_the_other_bit_for_bit(hosts: Hosts, tmp_path: Path):
    """With a flipped byte, then without a disk; at last without both, from the object store."""
    words = [
        *SHARDED,
        "--set",
        "run.checkpoints.local_every=2",
        "--set",
        "run.checkpoints.copies=1",
    ]
    store = ["--set", f"run.checkpoints.remote={tmp_path / 'store'}",
             "--set", "run.checkpoints.remote_every=16"]  # fmt: skip
    hosts.kill_at(7, *words)
    assert not list((hosts.place.path / "run").glob("checkpoints/*"))
    for rank in (0, 1):
        newest = HostTier(hosts.disk(rank)).steps()[-1]
        flip_byte(hosts.disk(rank) / "own" / str(newest))
    told = hosts.kill_at(11, *words)
    assert "does not have the digest it was written with" in told, told
    shutil.rmtree(hosts.disk(1))
    told = hosts.run(*words, *store)
    assert re.search(r"rank 1 was sent \d+ of its pieces of step \d+ by other hosts", told), told
    assert "cannot be uploaded" not in told
    assert re.search(r"trained 16 steps \(resumed from (8|10)\)", told), told
    assert hosts.place.curve() == hosts.reference()
    for lost in (hosts.disk(0), hosts.disk(1), hosts.place.path / "run/checkpoints"):
        shutil.rmtree(lost)
    told = hosts.run(*words, *store, "--set", "run.steps=18")
    assert "trained 18 steps (resumed from 16)" in told, told


def test_hosts_that_share_no_disk_upload_their_parts_and_restore_them(
    hosts: Hosts, tmp_path: Path, monkeypatch
):
    """Half of the requests fail, and an uploader is killed; then all is lost but the store."""
    place, url = hosts.place, "s3://runs/one"
    words = [
        *SHARDED, "--set", "run.directory=run-RANK", "--set", "run.checkpoints.local_every=2",
        "--set", f"run.checkpoints.remote={url}", "--set", "run.checkpoints.remote_every=4",
    ]  # fmt: skip
    (tmp_path / "runs").mkdir()
    with serving(tmp_path) as server, failing(server.url) as network:
        for name, value in credentials(network.url).items():
            monkeypatch.setenv(name, value)
        network.fails = lambda request: request.startswith("PUT")  # until it is killed
        both = hosts.start(*words)
        wait_for_uploader("run-1", both)
        os.kill(int(uploaders("run-1")[0]), signal.SIGKILL)
        network.fails = None
        told = [process.communicate(timeout=200) for process in both]
        assert [process.returncode for process in both] == [0, 0], told
        hosts.run(*words)  # it is complete: uploaded is what is missing
        assert place.curve("run-0") == hosts.reference()
        assert not list(place.path.glob("run-*/checkpoints/*"))
        for lost in (hosts.disk(0), hosts.disk(1), place.path / "run-0"):
            shutil.rmtree(lost)
        told = hosts.run(*words, "--set", "run.steps=18", "--set", "run.export=hf")
        assert "trained 18 steps (resumed from 16)" in told, told
        assert "exported to run-0/hf-18" in told, told
        assert re.search(r"rank 1 was sent \d+ of its pieces of .* by the object store", told), told
        assert place.curve("run-0")[:16] == place.curve("reference")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        assert not list(tmp_path.glob("runs/one/v1/files/1*/parts/*"))
        check_commands(place, url)


def wait_for_uploader(run: str, processes: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 100
    while not uploaders(run):
        assert time.monotonic() < deadline and all(one.poll() is None for one in processes)


def check_commands(place: Place, url: str) -> None:
    """What hosts uploaded in parts is listed, shown, verified and downloaded as any checkpoint."""
    listed, _ = place.command("checkpoints", "ls", url, "--json")
    assert {16, 18} <= {one["step"] for one in json.loads(listed)}
    shown, _ = place.command("checkpoints", "show", url)
    assert "pieces of [" in shown and "pieces/parameters." in shown
    out, _ = place.command("checkpoints", "verify", url)
    assert "16: intact" in out
    place.command("checkpoints", "pull", url, "pulled-18", "--step", "18")
    place.command("convert", "graphtrain-to-hf", "pulled-18", "folder")
    weights = [place.path / name / "model.safetensors" for name in ("run-0/hf-18", "folder")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    place.command("checkpoints", "pull", url, "pulled", "--step", "16")
    out, _ = place.command("checkpoints", "verify", "pulled")
    assert out == "16: intact\n"
    both = [arrays(place.path / name / "checkpoints", 16) for name in ("pulled", "reference")]
    assert is_equal(*both)
    assert (place.path / "pulled/config.toml").is_file()
