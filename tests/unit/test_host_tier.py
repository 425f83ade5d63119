"""Checkpoints on disks of single hosts: pieces, parts, and what peers send each other."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graphtrain.checkpoints import pieces
from graphtrain.checkpoints.host_tier import HostTier, Part
from graphtrain.checkpoints.layer_order import LayerOrder
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.peer_steps import PeerSteps
from graphtrain.checkpoints.peers import Peers, PeerServer
from graphtrain.checkpoints.pieces import assemble, piece_name, pieces_on_host
from graphtrain.checkpoints.steps import Retention
from graphtrain.checkpoints.tiered import TieredCheckpoints
from graphtrain.errors import TrainingError
from graphtrain.run import agreement
from lowering.xla.arrays import from_shards

WHOLE = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
PIECES = {f"pieces/a.b/{i}.{j}": WHOLE[3 * i : 3 * i + 3, 2 * j : 2 * j + 2].tobytes()
          for i in range(2) for j in range(4)}  # fmt: skip


@pytest.mark.parametrize(
    "index",
    [(), (slice(0, 3), slice(2, 4)), (slice(1, 5), slice(1, 8)), (4, slice(None)), (slice(2, 2),)],
)
def test_any_part_of_an_array_is_assembled_from_the_pieces_it_overlaps(index):
    read = []

    def read_piece(name):
        read.append(name)
        return PIECES[name]

    part = assemble("a/b", index, (6, 8), (3, 2), WHOLE.dtype, read_piece)
    np.testing.assert_array_equal(part, WHOLE[index])
    if index == (slice(0, 3), slice(2, 4)):
        assert read == ["pieces/a.b/0.1"]


def state(shards):
    mesh = Mesh(np.array(jax.devices()[:shards]), "x")
    weights = jax.device_put(WHOLE, NamedSharding(mesh, PartitionSpec(None, "x")))
    step = jax.device_put(np.int32(3), NamedSharding(mesh, PartitionSpec()))
    half = jax.device_put(WHOLE.astype(jax.numpy.bfloat16), NamedSharding(mesh, PartitionSpec()))
    return {"parameters": {"head": weights, "half": half}, "step": step}


def described(tree):
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree
    )


def tiered(directory, disk, **options):
    tier = HostTier(disk)
    peers = Peers([("127.0.0.1", 1)], "")
    steps = PeerSteps(tier, peers)
    steps.find()
    order = LayerOrder(None, from_shards)
    return TieredCheckpoints(
        directory, Retention(2), order, tier=tier, peers=peers, peer_steps=steps, **options
    )


def test_shards_are_saved_and_restored_on_another_mesh_bit_for_bit(tmp_path):
    saved = state(4)
    assert len(pieces_on_host(saved)) == 4 + 1 + 1  # replicated arrays once
    write_part(HostTier(tmp_path / "disk"), 9, "of a lost start", 0)
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk", whole_every=4)
    for step in (1, 2, 3):
        assert not checkpoints.is_due_whole(step)
        checkpoints.save(step, saved, {"step": step}, is_whole=False)
    assert checkpoints.is_due_whole(4)
    checkpoints.save(4, saved, {"step": 4}, is_whole=True)
    checkpoints.close()
    assert checkpoints.newest() == 4
    assert checkpoints.steps() == [2, 3, 4]
    assert checkpoints.path(3) == tmp_path / "disk/own/3"
    assert checkpoints.path(4) == tmp_path / "run/4"
    assert HostTier(tmp_path / "disk").steps() == [2, 3]
    other = tiered(tmp_path / "run", tmp_path / "disk")
    for shards in (1, 2, 8):
        like = state(shards)
        restored = other.restore(3, described(like))
        assert restored.data_position == {"step": 3}
        assert jax.tree.all(
            jax.tree.map(lambda a, b: (np.asarray(a) == np.asarray(b)).all(), restored.state, like)
        )
    other.close()


def test_pieces_share_no_memory_with_arrays_on_the_host():
    """As those of CPUs, and moments of an optimizer in the host memory of a GPU."""
    for is_on_host in (True, False):
        assert np.shares_memory(pieces._owned(WHOLE, is_on_host), WHOLE) is not is_on_host
    weights = state(2)["parameters"]["head"]
    (first, *_) = pieces_on_host({"head": weights}).values()
    assert not np.shares_memory(first, np.asarray(weights.addressable_shards[0].data))


def test_no_two_arrays_have_the_same_file():
    paths = ["a/b.c", "a.b/c", "a.b.c", "a/b/c", "a%2Eb/c"]
    assert len({piece_name(path, (0,)) for path in paths}) == len(paths)


def test_a_damaged_piece_is_refused_and_its_step_set_aside(tmp_path):
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk")
    checkpoints.save(3, state(2), {}, is_whole=False)
    checkpoints.close()
    piece = tmp_path / "disk/own/3" / piece_name("parameters/head", (0, 1))
    content = bytearray(piece.read_bytes())
    content[7] ^= 1
    piece.write_bytes(content)
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk")
    with (
        pytest.warns(UserWarning, match=r"pieces/parameters.head/0.1 is damaged"),
        pytest.raises(DamagedCheckpoint, match=r"no host has pieces/parameters.head/0.1") as damage,
    ):
        checkpoints.restore(3, described(state(2)))
    assert checkpoints.quarantine(damage.value) == tmp_path / "disk/quarantine"
    assert HostTier(tmp_path / "disk").steps() == []
    assert (tmp_path / "disk/quarantine/own/3/manifest.json").is_file()


def test_a_host_that_reads_its_pieces_for_long_is_waited_for(tmp_path, monkeypatch):
    """Two ranks; the other one is still reading when it is asked twice."""
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk")
    checkpoints.save(3, state(4), {}, is_whole=False)
    checkpoints.close()
    other, waits, at_once, most = ["", ""], [], [], []

    def gather(word):
        if word == "over":
            return [word, other.pop() if other else "over"]
        return [word, word]

    read = HostTier.read

    def read_slowly(*arguments):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.05)
        at_once.pop()
        return read(*arguments)

    run_long = partial(agreement.on_all_ranks_long, wait=lambda: waits.append("watchdog"))
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk", run_long=run_long)
    monkeypatch.setattr(HostTier, "read", read_slowly)
    monkeypatch.setattr(agreement, "_LONG_ACTION_SECONDS", 0.01)
    answers = {"count": lambda: 2, "rank": lambda: 0, "all_gather_text": gather}
    for name, answer in answers.items():
        monkeypatch.setattr(agreement.distributed, name, answer)
    restored = checkpoints.restore(3, described(state(4)))
    assert len(waits) > 2 and not other  # also while this one reads
    assert max(most) > 1  # pieces
    np.testing.assert_array_equal(restored.state["parameters"]["head"], WHOLE)


def test_a_step_that_cannot_be_restored_is_not_the_newest(tmp_path):
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk")
    for step in (2, 3):
        checkpoints.save(step, state(1), {}, is_whole=False)
    checkpoints.close()
    (piece,) = (tmp_path / "disk/own/3/pieces/step").iterdir()
    piece.write_bytes(b"4444")
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk")
    with pytest.warns(UserWarning, match=r"is damaged"), pytest.raises(DamagedCheckpoint):
        checkpoints.restore(3, described(state(1)))
    checkpoints.restore(2, described(state(1)))
    assert checkpoints.newest() == 2  # to which a run rewinds after a spike


def test_a_disk_that_another_host_writes_to_ends_the_run_before_a_step_is_lost(
    tmp_path, monkeypatch
):
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk")
    for step in (1, 2):
        checkpoints.save(step, state(1), {}, is_whole=False)
    checkpoints.wait()

    def write_as_another_host(barrier):
        write_part(HostTier(tmp_path / "disk"), 3, barrier.split("/")[2], 1)

    monkeypatch.setattr(
        "graphtrain.checkpoints.tiered.distributed.wait_for_all", write_as_another_host
    )
    checkpoints.save(3, state(1), {}, is_whole=False)
    with pytest.raises(TrainingError, match=r"disk seemed to be a disk of each host .* rank 0 of"):
        checkpoints.wait()
    assert HostTier(tmp_path / "disk").steps() == [1, 2, 3]


def test_a_save_that_is_cut_short_leaves_the_one_before_it(tmp_path, monkeypatch):
    checkpoints = tiered(tmp_path / "run", tmp_path / "disk")
    checkpoints.save(3, state(2), {"of": "first"}, is_whole=False)
    checkpoints.wait()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("graphtrain.checkpoints.host_tier.write_manifest", fail)
    checkpoints.save(4, state(2), {}, is_whole=False)
    with pytest.raises(Exception, match=r"disk cannot be written \(No space left on device\); fr"):
        checkpoints.wait()
    assert HostTier(tmp_path / "disk").steps() == [3]
    assert [path.name for path in (tmp_path / "disk/own").iterdir()] == ["3"]


def write_part(tier, step, save, group, content=b"1234"):
    part = Part(save, group, 2, {"a": [1]})
    tier.write(step, part, {"step": step}, {f"pieces/a/{group}": np.frombuffer(content, np.int32)})


def test_a_part_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, at_rename = set(), set()
    fsync, rename = os.fsync, os.rename

    def record(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_before(source, destination):
        at_rename.update(synced)
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", record_before)
    write_part(HostTier(tmp_path), 4, "first", 0)
    written = [tmp_path / "own/4", *(tmp_path / "own/4").rglob("*")]
    assert len(written) == 8 and {path.stat().st_ino for path in written} <= at_rename
    assert (tmp_path / "own").stat().st_ino in synced - at_rename
    synced.clear()
    HostTier(tmp_path).set_complete(4)
    assert synced == {(tmp_path / "own/4").stat().st_ino}


def test_a_copy_of_another_host_counts_as_a_checkpoint(tmp_path):
    write_part(HostTier(tmp_path), 4, "first", 0)
    (tmp_path / "own").rename(tmp_path / "copies")
    assert HostTier(tmp_path).steps() == [4]  # which --fresh must not leave behind


def test_what_a_killed_process_had_not_finished_takes_no_room_for_ever(tmp_path):
    left = [tmp_path / "own/7.unfinished/a", tmp_path / "copies/6.deleted/a"]
    for path in left:
        path.mkdir(parents=True)
    write_part(HostTier(tmp_path), 4, "first", 0)
    assert [path.name for path in tmp_path.glob("*/*")] == ["4"]


def test_a_part_is_deleted_while_peers_ask_for_others(tmp_path):
    tier = HostTier(tmp_path)

    class AskedMeanwhile(type(tmp_path)):
        """Path of a part; a thread reads the entries of another one while it is compared."""

        def __eq__(self, other):
            tier._entries[Path(str(len(tier._entries))), ""] = {}
            return False

        __hash__ = Path.__hash__

    for number in range(3):
        tier._entries[AskedMeanwhile(str(number)), ""] = {}
    write_part(tier, 4, "first", 0)
    write_part(tier, 4, "second", 0)
    assert [held.part.save for held in tier.parts()] == ["second"]


def test_a_host_that_resolves_its_name_to_loopback_serves_the_others(tmp_path, monkeypatch):
    tier, found = (
        HostTier(tmp_path),
        [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))],
    )
    write_part(tier, 4, "first", 1)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        patched.setattr(socket, "getfqdn", lambda name: pytest.fail("asks DNS, which may be slow"))
        server = PeerServer(tier, "host0", "secret")
    peers = Peers([("127.0.0.1", server.port)], "secret")
    assert peers.read(0, 4, "first", "pieces/a/1") == b"1234"
    server.close()


def test_peers_send_files_only_of_the_save_and_to_those_who_know_the_token(tmp_path):
    tier = HostTier(tmp_path)
    write_part(tier, 4, "first", 1)
    server = PeerServer(tier, "127.0.0.1", "secret")
    peers = Peers([("127.0.0.1", server.port)], "secret")
    assert peers.read(0, 4, "first", "pieces/a/1") == b"1234"
    assert peers.names(0, 4, "first") == ["about/metadata", "about/part.json", "pieces/a/1"]
    assert peers.read(0, 4, "second", "pieces/a/1") is None
    assert peers.read(0, 5, "first", "pieces/a/1") is None
    assert peers.read(0, 4, "first", "../../../../etc/passwd") is None
    assert Peers(peers.addresses, "guess").read(0, 4, "first", "pieces/a/1") is None
    (tmp_path / "own/4/pieces/a/1").write_bytes(b"1235")
    with pytest.warns(UserWarning, match=r"rank 0 has a damaged pieces/a/1 of step 4"):
        assert peers.read(0, 4, "first", "pieces/a/1") is None
    (tmp_path / "copies").mkdir()
    shutil.copytree(tmp_path / "own/4", tmp_path / "copies/4")
    (tmp_path / "copies/4/pieces/a/1").write_bytes(b"1234")
    assert peers.read(0, 4, "first", "pieces/a/1") == b"1234"  # the copy is sound
    with pytest.warns(UserWarning, match=r"own/4/pieces/a/1 is damaged"):
        assert tier.read(4, "first", "pieces/a/1") == b"1234"
    server.close()
    with pytest.warns(UserWarning, match=r"rank 0 does not send pieces/a/1 of step 4: .*refused"):
        assert peers.read(0, 4, "first", "pieces/a/1") is None


def test_parts_of_two_saves_of_one_step_are_never_joined(tmp_path, monkeypatch):
    """Two ranks, of which the second one has what it is told."""
    from graphtrain.checkpoints import peer_steps

    tier, second = HostTier(tmp_path), []

    def all_gather_text(word):
        return [word, json.dumps(second) if word.startswith("[") else word]

    for name, value in {"count": 2, "rank": 0}.items():
        monkeypatch.setattr(peer_steps.distributed, name, lambda value=value: value)
    monkeypatch.setattr(peer_steps.distributed, "all_gather_text", all_gather_text)
    write_part(tier, 4, "first", 0)
    tier.set_complete(4)
    write_part(tier, 8, "third", 0)
    steps = PeerSteps(tier, Peers([("127.0.0.1", 1)] * 2, ""))
    second[:] = [[4, "second", 1, 2, True], [8, "third", 0, 2, False]]
    steps.find()
    assert steps.found == {} and set(steps.lost) == {4}  # step 8 was never complete


KILLED = """
import itertools, os, signal, sys, time
from pathlib import Path
import numpy as np
from graphtrain.checkpoints.host_tier import HostTier, Part
from graphtrain.checkpoints.manifest import verify_files

tier, found = HostTier(Path(sys.argv[1])), 0
os.fsync = lambda descriptor: None  # which matters to machines that lose power
def save():
    for step in itertools.count(1):
        pieces = {f"pieces/a/{place}": np.full(9000, step, np.int32) for place in range(9)}
        tier.write(step % 5 + 1, Part(str(step), 0, 1, {"a": [9000]}), {"step": step}, pieces)
        tier.remove_others(5, 3)

for milliseconds in range(1, 100, 3):
    process = os.fork()
    if not process:
        save()
    time.sleep(milliseconds / 1000)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    for held in tier.parts():
        verify_files(held.directory)
        contents = {path.read_bytes() for path in held.directory.glob("pieces/a/*")}
        assert contents == {np.full(9000, int(held.part.save), np.int32).tobytes()}
        assert len(list(held.directory.glob("pieces/a/*"))) == 9
        found += 1
print(found)
"""


def test_a_process_that_is_killed_while_it_saves_leaves_no_step_that_looks_whole(tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
