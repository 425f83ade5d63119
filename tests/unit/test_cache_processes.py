"""Processes that share a store. The functions without test_ are what the other processes run."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import graphtrain
from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from lowering.artifact import Artifact
from lowering.machine import leases
from lowering.machine.leases import LeaseTiming

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


QUICK = {
    "heartbeat_seconds": 0.05,
    "expiry_seconds": 0.5,
}  # seconds, so that tests need not wait long
FEW = [CacheKey.of(number=number) for number in range(3)]


def race(root, host, compiled, go):
    """Compile a thousand keys, as another host does at the same time."""
    cache = Cache(Path(root), LeaseTiming(host=host))
    while not Path(go).exists():
        time.sleep(0.001)
    for number in range(1000):
        key = CacheKey.of(number=number)
        with cache.lock(key):
            if cache.get(key) is None:
                with open(compiled, "a") as file:
                    file.write(f"{number}\n")
                cache.put(key, Artifact(b"payload", {}))


def claim_for_ever(root, host, witnesses):
    """Claim one of a few keys, see that nobody else has it, let go, and again."""
    cache = Cache(Path(root), LeaseTiming(host=host, **QUICK))
    chance = random.Random(os.getpid())
    print("claiming", flush=True)
    while True:
        key = chance.choice(FEW)
        witness = Path(witnesses, key.digest)
        with cache.lock(key):
            with suppress(FileNotFoundError, ValueError):
                other = int(witness.read_text())
                assert other == os.getpid() or is_gone(other), f"{other} has it too"
            witness.write_text(str(os.getpid()))
            time.sleep(chance.choice((0, 0.01)))
            witness.unlink()


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except FileNotFoundError:
        return True


def hold_on_another_host(root):
    with Cache(Path(root), LeaseTiming(host="elsewhere", **QUICK)).lock(KEY):
        print("held", flush=True)
        sys.stdin.readline()
        Cache(Path(root)).put(KEY, Artifact(b"late", {}))
    print("let go", flush=True)


def compile_quickly(root, compiled):
    cache = Cache(Path(root), LeaseTiming(**QUICK))
    with cache.lock(KEY):
        if cache.get(KEY) is None:
            with open(compiled, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(1.0)  # longer than a lease without a sign of life
            cache.put(KEY, Artifact(b"in time", {}))


def write_on(root, number):
    """Programs and requests until killed; a line for each that is stored."""
    cache = Cache(Path(root))
    for count in itertools.count():
        key, request = (CacheKey.of(kind=kind, of=[number, count]) for kind in "pr")
        cache.put(key, Artifact(os.urandom(100), {}))
        cache.record_request(request, key, graph="train")
        print(request.digest, key.digest, flush=True)


def start(function, *arguments):
    command = [sys.executable, __file__, function.__name__, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(TREE)}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


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


def test_two_hosts_that_race_a_thousand_times_compile_each_key_once(tmp_path):
    compiled, go = tmp_path / "compiled", tmp_path / "go"
    hosts = [start(race, tmp_path / "store", host, compiled, go) for host in ("one", "two")]
    go.touch()
    assert [host.communicate(timeout=200) and host.returncode for host in hosts] == [0, 0]
    assert sorted(map(int, compiled.read_text().split())) == list(range(1000))
    assert Cache(tmp_path / "store").verify().programs == 1000


def test_the_lease_of_a_host_that_died_is_taken_over_once(tmp_path):
    owner = start(hold_on_another_host, tmp_path)
    assert owner.stdout and owner.stdout.readline() == "held\n"
    owner.kill()
    owner.communicate()
    waiting = [start(compile_quickly, tmp_path, tmp_path / "compiled") for _ in range(4)]
    assert finish(waiting) == [0] * 4
    assert len((tmp_path / "compiled").read_text().splitlines()) == 1


def test_killed_at_any_moment_owners_and_claimants_leave_every_lease_to_be_had(tmp_path):
    chance = random.Random(0)
    store, witnesses = tmp_path / "store", tmp_path / "witnesses"
    witnesses.mkdir()
    alive = []
    for round_ in range(30):
        while len(alive) < 3:
            claimant = start(claim_for_ever, store, f"host {round_ % 2}", witnesses)
            assert claimant.stdout and claimant.stdout.readline() == "claiming\n"
            alive.append(claimant)
        time.sleep(chance.uniform(0, 0.2))
        victim = alive.pop(0)
        assert victim.poll() is None, "a claimant saw two owners at once, or failed"
        victim.kill()
        victim.communicate()
    for claimant in alive:
        assert claimant.poll() is None
        claimant.kill()
        claimant.communicate()
    for key in FEW:
        lease, deadline = Cache(store, LeaseTiming(**QUICK)).lease(key), time.monotonic() + 10
        while not lease.try_acquire():
            assert time.monotonic() < deadline, f"{lease.owner()} has it for ever"
            time.sleep(0.01)
        assert len(list((store / "v1" / "leases" / key.digest).iterdir())) == 1
        lease.release()


def test_an_owner_killed_before_it_wrote_its_name_is_over_in_time(tmp_path):
    cache = Cache(tmp_path, LeaseTiming(**QUICK))
    with cache.lock(KEY):
        pass
    (tmp_path / "v1" / "leases" / KEY.digest / "2").touch()
    lease = cache.lease(KEY)
    assert not lease.try_acquire()
    assert lease.owner() == "another process"
    with cache.lock(KEY):
        pass


def test_a_claim_of_who_looked_long_ago_fails(tmp_path, monkeypatch):
    cache, late = Cache(tmp_path), Cache(tmp_path).lease(KEY)
    look = leases._highest
    looks = []

    def look_and_pause(directory):
        seen = look(directory)
        if not looks:
            looks.append(seen)
            for _ in range(2):  # others have it and let go
                with cache.lock(KEY):
                    pass
        return seen

    monkeypatch.setattr(leases, "_highest", look_and_pause)
    assert not late.try_acquire()
    assert late.try_acquire()


def test_an_owner_that_was_paused_and_wakes_up_does_no_harm(tmp_path):
    owner = start(hold_on_another_host, tmp_path)
    assert owner.stdout and owner.stdin and owner.stdout.readline() == "held\n"
    owner.send_signal(signal.SIGSTOP)
    other = start(compile_quickly, tmp_path, tmp_path / "compiled")
    assert finish([other]) == [0]
    owner.send_signal(signal.SIGCONT)
    out, _ = owner.communicate("go on\n", timeout=30)
    assert owner.returncode == 0 and out == "let go\n"
    stored = Cache(tmp_path).get(KEY)
    assert stored is not None and stored.payload == b"in time"
    with Cache(tmp_path).lock(KEY):
        pass


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
        answers, listed = cache.stored_programs(), {entry.program for entry in cache.list()}
        assert all(answers[request] == program for request, program in stored)
        assert listed.issuperset(program for _, program in stored)
        assert cache.explain(CacheKey.of(other=1), graph="train").nearest
        assert cache.gc().removed == ()
        writer.kill()
        # The last line of a killed process may be half a line.
        lines = writer.communicate()[0].splitlines(keepends=True)
        stored += [tuple(line.split()) for line in lines if line.endswith("\n")]
    answers = cache.stored_programs()
    assert all(answers[request] == program for request, program in stored)
    assert cache.verify().valid


def test_gc_keeps_what_another_process_holds(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, Artifact(b"x", {}))
    owner = start(hold, tmp_path)
    assert owner.stdout and owner.stdout.readline() == "held\n"
    done = cache.gc(max_bytes=0)
    owner.kill()
    owner.communicate()
    assert [entry.program for entry in done.leased] == [KEY.digest]
    assert cache.get(KEY) is not None
    assert len(cache.gc(max_bytes=0).removed) == 1
    assert cache.get(KEY) is None


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
