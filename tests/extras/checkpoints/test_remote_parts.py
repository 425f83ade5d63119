"""Checkpoints that several hosts upload in parts: whole when all pieces are there, or absent."""

import json
import shutil
import threading

import numpy as np
import pytest

from graphtrain.checkpoints.arrays import restore_array
from graphtrain.checkpoints.host_tier import HostTier, Part
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.remote_manifest import DamagedRemoteCheckpoint, new_prefix
from graphtrain.checkpoints.remote_parts import (
    PartSource,
    PartsUpload,
    UploadedParts,
    open_remote_step,
    upload_parts,
)
from graphtrain.checkpoints.steps import Retention
from graphtrain.checkpoints.upload_process import UploadJob, UploadRequest, _Queue, _upload

WHOLE = np.arange(8, dtype=np.float32)
METADATA = {"step": 4, "loader": {"step": 4}, "arrays": {"a": [[8], "float32"]}}


class Hosts:
    """Two hosts, each with half of an array, and a store."""

    def __init__(self, path) -> None:
        self.path, prefix = path, new_prefix(4)
        self.remote = RemoteCheckpoints(str(path / "store"), create=True)
        self.uploads = [self._save(rank, prefix) for rank in (0, 1)]
        self.job = UploadJob(str(path / "run"), str(path / "store"), None, Retention(3))
        (path / "run").mkdir()

    def _save(self, rank: int, prefix: str) -> PartsUpload:
        tier = HostTier(self.path / f"disk-{rank}")
        pieces = {f"pieces/a/{rank}": WHOLE[4 * rank : 4 * rank + 4]}
        tier.write(4, Part("save", rank, 2, {"a": [4]}), METADATA, pieces)
        return PartsUpload(prefix, [PartSource(rank, str(tier.own(4)))], [0, 1], rank == 0)

    def piece(self, rank: int):
        return self.path / f"disk-{rank}/own/4/pieces/a/{rank}"

    def upload(self, rank: int, queue: _Queue) -> bool:
        """Upload as the process beside a rank does."""
        return _upload(self.job, UploadRequest(4, self.uploads[rank]), queue)


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


def events(capsys) -> list[str]:
    return [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines() if line]


def test_a_step_is_whole_when_every_host_has_uploaded_its_part(hosts, tmp_path, capsys):
    first = threading.Thread(target=hosts.upload, args=(0, _Queue()))
    first.start()
    first.join(1.5)
    assert first.is_alive() and hosts.remote.steps() == []  # it waits for the other host
    assert hosts.upload(1, _Queue())
    first.join(30)
    assert hosts.remote.steps() == [4]
    assert sorted(events(capsys)) == ["part uploaded", "uploaded", "waiting"]
    assert not list((tmp_path / "store").glob("v1/files/*/parts/*"))
    hosts.remote.verify(4)
    assert hosts.upload(0, _Queue()) and events(capsys) == ["present"]
    step = open_remote_step(hosts.remote, hosts.remote.manifest(4))
    assert step is not None and step.part.save == "save" and step.info.data_position == {"step": 4}
    assert step.read("pieces/a/1") == WHOLE[4:].tobytes()
    path = hosts.remote.download(4, tmp_path / "pulled")
    np.testing.assert_array_equal(restore_array(path.parent, 4, "a"), WHOLE)
    assert [one.name for one in path.parent.iterdir()] == ["4"]


def test_a_part_that_never_comes_is_given_up_for_a_newer_step(hosts, capsys):
    queue = _Queue()
    queue.put(UploadRequest(8))
    assert hosts.upload(0, queue)
    assert events(capsys) == ["waiting", "incomplete"] and hosts.remote.steps() == []


def test_a_part_that_came_before_a_newer_step_is_not_given_up(hosts, capsys, monkeypatch):
    queue = _Queue()

    def wait_for_newer(seconds):  # the other host uploads its part, then all save the next step
        upload_parts(hosts.remote, hosts.uploads[1])
        return True

    monkeypatch.setattr(queue, "wait_for_newer", wait_for_newer)
    assert hosts.upload(0, queue)
    assert events(capsys) == ["waiting", "uploaded"] and hosts.remote.steps() == [4]


def test_rank_0_learns_at_once_that_another_host_cannot_upload_its_part(hosts, capsys):
    hosts.piece(1).write_bytes(b"x" * 16)
    first = threading.Thread(target=hosts.upload, args=(0, _Queue()))
    first.start()
    assert hosts.upload(1, _Queue())
    first.join(10)
    assert not first.is_alive()  # there is no newer step, for which it would give up
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    own, of_first = sorted((one["reason"] for one in told if one["event"] == "refused"), key=len)
    assert "pieces/a/1 does not have the digest" in own and own in of_first
    assert "cannot upload its part" in of_first and hosts.remote.steps() == []


def test_what_is_damaged_missing_or_differs_between_hosts_never_looks_whole(
    hosts, tmp_path, capsys
):
    upload_parts(hosts.remote, hosts.uploads[0])
    with pytest.raises(DamagedRemoteCheckpoint, match=r"no host has uploaded pieces/a/1"):
        finish(hosts, [0])
    (record,) = (tmp_path / "store").glob("v1/files/*/parts/0.json")
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"pieces": {}}))
    with pytest.raises(DamagedRemoteCheckpoint, match=r"parts/0.json does not have the digest"):
        finish(hosts, [0])
    shutil.copy(hosts.piece(1), spare := tmp_path / "spare")
    hosts.piece(1).write_bytes(b"x" * 16)
    with pytest.raises(DamagedCheckpoint, match=r"pieces/a/1 does not have the digest"):
        upload_parts(hosts.remote, hosts.uploads[1])
    assert hosts.upload(1, _Queue()) and events(capsys) == ["refused"]
    shutil.copy(spare, hosts.piece(1))
    other = HostTier(tmp_path / "disk-1")
    other.write(4, Part("save", 1, 2, {"a": [4]}), METADATA, {"pieces/a/0": WHOLE[4:]})
    upload_parts(hosts.remote, hosts.uploads[0])
    upload_parts(hosts.remote, hosts.uploads[1])
    with pytest.raises(DamagedRemoteCheckpoint, match=r"two hosts have different contents of pi"):
        finish(hosts, [0, 1])
    assert hosts.remote.steps() == []


def finish(hosts, numbers) -> None:
    upload = PartsUpload(hosts.uploads[0].prefix, hosts.uploads[0].sources, numbers, True)
    uploaded = UploadedParts(hosts.remote, 4, upload)
    assert uploaded.are_complete()
    uploaded.finish(hosts.path / "run")
