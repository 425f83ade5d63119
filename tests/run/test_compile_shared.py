"""Compiling beside others: graphs that another has, killed processes, a full disk."""

import json
import random
import signal
import subprocess
import time

import psutil
import pytest

from graphtrain.cache import Cache
from graphtrain.compile.request_keys import request_keys
from graphtrain.config import load_config
from graphtrain.config.resolve import resolve


def requests_of(place):
    return request_keys(resolve(load_config(place.path / "config.toml").program))


def report_of(place):
    return json.loads((place.path / "r.json").read_text())


def family(process):
    """A command's forkserver, resource tracker and workers."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def test_a_graph_that_another_has_is_put_off_and_the_others_compiled(cold):
    lease = Cache(cold.cache).lease(requests_of(cold)["train"])
    assert lease.try_acquire()
    words = ["--jobs", "1", "--timeout", "200", "--report", "r.json"]
    process = cold.start("compile", "config.toml", *words)
    stages = []
    for line in process.stderr:
        stages.append(line.strip())
        if {"evaluate: compiled", "init: compiled"} <= set(stages):
            lease.release()
            break
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert any(stage.startswith("train: waiting for process") for stage in stages)
    assert "train: starting" in err and report_of(cold)["successful"] == 3


def test_what_another_has_compiled_meanwhile_is_not_compiled_again(cold, compiled):
    cache, request = Cache(cold.cache), requests_of(cold)["train"]
    lease = cache.lease(request)
    assert lease.try_acquire()
    process = cold.start("compile", "config.toml", "--report", "r.json")
    for line in process.stderr:
        if line.startswith("train: waiting"):
            break
    digest = Cache(compiled).program_digest(request)
    record, payload = Cache(compiled).program_files(digest)
    cache.import_program(digest, record, payload)
    cache.record_request(request, digest)
    lease.release()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    statuses = {graph["label"]: graph["status"] for graph in report_of(cold)["graphs"]}
    assert statuses == {"train": "cached", "evaluate": "compiled", "init": "compiled"}


@pytest.mark.usefixtures("compiled_quickly")
def test_where_memory_is_short_one_graph_is_compiled_at_a_time(cold):
    _, err = cold.command("compile", "config.toml", "--jobs", "3", "--memory", "1MB")
    ends = [line.partition(": ")[2] for line in err.splitlines()]
    assert [stage for stage in ends if stage in ("starting", "compiled")] == [
        "starting",
        "compiled",
    ] * 3


def test_killed_its_workers_end_and_another_goes_on_at_once(cold):
    process = cold.start("compile", "config.toml")
    for line in process.stderr:
        if line == "train: compiling\n":
            break
    children = family(process)
    assert len(children) >= 4  # forkserver, resource tracker and workers
    process.kill()
    process.communicate()
    _, err = cold.command("compile", "config.toml", "--report", "r.json")
    assert report_of(cold)["failed"] == 0
    assert "waiting" not in err
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_whatever_is_killed_whenever_the_next_compile_finishes_the_work(cold):
    chance = random.Random(0)
    for _ in range(6):
        process = cold.start("compile", "config.toml", "--retries", "0")
        time.sleep(chance.uniform(0.2, 4))
        victims = [psutil.Process(process.pid), *family(process)]
        for victim in chance.sample(victims, min(2, len(victims))):
            victim.send_signal(signal.SIGKILL)
        process.communicate(timeout=200)
    cold.command("compile", "config.toml", "--report", "r.json")
    assert report_of(cold)["failed"] == 0
    cold.command("cache", "verify")
    cold.command("run", "config.toml", "--set", "run.steps=2")


@pytest.mark.usefixtures("compiled_quickly")
def test_a_full_disk_is_said_and_the_next_compile_finishes_the_work(cold):
    cold.cache.mkdir()
    disk = ["mount", "-t", "tmpfs", "-o", "size=100k,mode=700", "tmpfs", str(cold.cache)]
    if subprocess.run(disk, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        _, err = cold.command("compile", "config.toml", status=2)
        assert "free space, for example with `graphtrain cache gc`" in err
        larger = ["mount", "-o", "remount,size=100M", str(cold.cache)]
        subprocess.run(larger, check=True)
        cold.command("cache", "verify")
        cold.command("compile", "config.toml", "--report", "r.json")
        assert report_of(cold)["failed"] == 0
        cold.command("run", "config.toml", "--set", "run.steps=2")
    finally:
        subprocess.run(["umount", "-l", str(cold.cache)], check=True)
