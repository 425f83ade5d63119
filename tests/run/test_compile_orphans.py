"""A compiler with a process of its own ends with whoever waited for it."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Begins a process of its own, as neuronx-cc does, and is not done in time.
SLOW = """#!/bin/sh
if [ "$1" = --version ]; then echo "NeuronX Compiler version 2.27.5334.0+ab12"; exit 0; fi
sleep 600 &
echo $$ $! >> "$0.begun"
wait
"""
WORDS = ["config.toml", "--target", "trn1:1", "--jobs", "1"]


@pytest.fixture
def scratch(monkeypatch) -> Iterator[Path]:
    """Where temporary files go; with a short name, since that of a socket in it is limited."""
    with tempfile.TemporaryDirectory(prefix="gt-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.fixture
def begun(cold, scratch, tmp_path, monkeypatch) -> Path:
    """A slow compiler on the path; the file to which it writes its processes."""
    directory = tmp_path / "bin"
    directory.mkdir()
    compiler = directory / "neuronx-cc"
    compiler.write_text(SLOW)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return directory / "neuronx-cc.begun"


def wait_until(holds):
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_gone(number):
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE  # nobody asked how it ended
    except psutil.NoSuchProcess:
        return True


def processes(begun):
    return [int(number) for number in begun.read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_command_and_leaves_nothing(cold, begun, scratch, number):
    process = cold.start("compile", *WORDS)
    try:
        wait_until(begun.exists)
    finally:
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: all(map(is_gone, processes(begun))))
    wait_until(lambda: not [path for path in scratch.iterdir() if path.name[:5] == "graph"])


def test_it_ends_with_its_worker(cold, begun):
    process = cold.start("compile", *WORDS, "--retries", "0")
    try:
        wait_until(begun.exists)
        first = processes(begun)[:2]
        psutil.Process(first[0]).parent().kill()
        wait_until(lambda: all(map(is_gone, first)))
    finally:
        process.kill()
        process.communicate()
