"""Processes that share a store. The functions without test_ are what the other processes run."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import graphtrain
from graphtrain.cache import Cache
from graphtrain.key import CacheKey
from lowering.artifact import Artifact

KEY = CacheKey.of(text="module {}")
TREE = Path(graphtrain.__file__).parents[1]


def compile_once(root, compiled):
    cache = Cache(Path(root))
    with cache.lock(KEY):
        if cache.get(KEY) is None:
            with open(compiled, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.05)
            cache.put(KEY, Artifact(os.urandom(1000), {}))
    assert cache.get(KEY) is not None


def put_at_once(root, start):
    while not Path(start).exists():
        time.sleep(0.001)
    for number in range(20):
        Cache(Path(root)).put(CacheKey.of(number=number), Artifact(os.urandom(1000), {}))


def hold(root):
    with Cache(Path(root)).lock(KEY):
        print("held", flush=True)
        time.sleep(60)


def die_before_rename(root):
    os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    Cache(Path(root)).put(KEY, Artifact(bytes(1000), {}))


def write_on(root, number):
    """Programs and requests until killed; a line for each that is stored."""
    cache = Cache(Path(root))
    for count in itertools.count():
        key, request = (CacheKey.of(kind=kind, of=[number, count]) for kind in "pr")
        cache.put(key, Artifact(os.urandom(100), {}))
        cache.link(request, key, graph="train")
        print(request.digest, key.digest, flush=True)


def start(function, *arguments):
    command = [sys.executable, __file__, function.__name__, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(TREE)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finish(processes):
    return [process.communicate(timeout=30) and process.returncode for process in processes]


def test_two_processes_compile_once(tmp_path):
    processes = [start(compile_once, tmp_path, tmp_path / "compiled") for _ in range(2)]
    assert finish(processes) == [0, 0]
    assert len((tmp_path / "compiled").read_text().splitlines()) == 1


def test_eight_processes_compile_once(tmp_path):
    processes = [start(compile_once, tmp_path, tmp_path / "compiled") for _ in range(8)]
    assert finish(processes) == [0] * 8
    assert len((tmp_path / "compiled").read_text().splitlines()) == 1


def test_threads_exclude_each_other_too(tmp_path):
    arguments = (tmp_path, tmp_path / "compiled")
    threads = [threading.Thread(target=compile_once, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / "compiled").read_text().splitlines()) == 1


def test_puts_without_a_lock_leave_one_sound_entry_for_each_key(tmp_path):
    processes = [start(put_at_once, tmp_path, tmp_path / "go") for _ in range(4)]
    (tmp_path / "go").touch()
    assert finish(processes) == [0] * 4
    report = Cache(tmp_path).verify()
    assert (report.programs, report.problems) == (20, ())
    assert not (tmp_path / "v1" / "quarantine").exists()
    assert list((tmp_path / "v1" / "tmp").iterdir()) == []


def test_a_killed_owner_frees_its_lock(tmp_path):
    owner = start(hold, tmp_path)
    assert owner.stdout and owner.stdout.readline() == "held\n"
    waited = []

    def kill(description):
        waited.append(description)
        owner.kill()

    with Cache(tmp_path).lock(KEY, on_wait=kill):
        owner.communicate()
    assert len(waited) == 1
    assert f"process {owner.pid} on {os.uname().nodename}" in waited[0]


def test_a_free_lock_is_not_waited_for(tmp_path):
    waited = []
    for _ in range(2):
        with Cache(tmp_path).lock(KEY, on_wait=waited.append):
            pass
    assert waited == []


def test_a_process_killed_within_put_leaves_nothing_visible(tmp_path):
    assert finish([start(die_before_rename, tmp_path)]) == [-signal.SIGKILL]
    cache = Cache(tmp_path)
    assert cache.get(KEY) is None
    assert cache.list() == ()
    (left,) = (tmp_path / "v1" / "tmp").iterdir()
    assert cache.gc().leftovers == 0  # too young: its owner may be in another container
    os.utime(left, (0, time.time() - 1000))
    assert cache.gc().leftovers == 1
    cache.put(KEY, Artifact(b"x", {}))
    assert cache.get(KEY) is not None


def test_listings_stand_while_others_write_and_are_killed(tmp_path):
    """Nothing stored is missed, and what gc calls left over never is what somebody needs."""
    cache = Cache(tmp_path)
    writers = [start(write_on, tmp_path, number) for number in range(3)]
    stored = [tuple(writer.stdout.readline().split()) for writer in writers if writer.stdout]
    for writer in writers:
        answers, listed = cache.answers(), {entry.program for entry in cache.list()}
        assert all(answers[request] == program for request, program in stored)
        assert listed.issuperset(program for _, program in stored)
        assert cache.explain(CacheKey.of(other=1), graph="train").nearest
        assert cache.gc().removed == ()
        writer.kill()
        stored += [tuple(line.split()) for line in writer.communicate()[0].splitlines()]
    answers = cache.answers()
    assert all(answers[request] == program for request, program in stored)
    assert cache.verify().sound


def test_gc_keeps_what_another_process_holds(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, Artifact(b"x", {}))
    owner = start(hold, tmp_path)
    assert owner.stdout and owner.stdout.readline() == "held\n"
    done = cache.gc(max_bytes=0)
    owner.kill()
    owner.communicate()
    assert [entry.program for entry in done.locked] == [KEY.digest]
    assert cache.get(KEY) is not None
    assert len(cache.gc(max_bytes=0).removed) == 1
    assert cache.get(KEY) is None


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
