"""Blocks of a streamed dataset in a directory that several processes share."""

import errno
import os

from graphtrain.data.indexed.blocks import block_digest
from graphtrain.run.streaming.block_files import BlockFiles, remove_replaced

BLOCKS = [b"first", b"second", b"third"]
DIGESTS = [block_digest(block) for block in BLOCKS]


def test_a_block_that_another_process_removes_meanwhile_is_absent(tmp_path, monkeypatch):
    for number, block in enumerate(BLOCKS):
        (tmp_path / str(number)).write_bytes(block)
    scandir = os.scandir

    def remove_after(path):
        entries = list(scandir(path))
        (tmp_path / "1").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(os, "scandir", remove_after)
    files = BlockFiles(tmp_path, DIGESTS, 3, 1)
    assert [files.read(number) for number in range(3)] == [b"first", None, b"third"]


def test_what_killed_processes_had_not_written_is_removed(tmp_path):
    names = [".0.7.8", ".1.7.9"]
    for name in names:
        (tmp_path / name).write_bytes(b"fir")
    os.utime(tmp_path / names[0], (0, 0))
    BlockFiles(tmp_path, DIGESTS, 3, 1)
    assert [path.name for path in tmp_path.iterdir()] == [names[1]]  # another process may write it


def test_a_damaged_block_on_a_disk_that_is_read_only_is_absent(tmp_path, monkeypatch):
    (tmp_path / "1").write_bytes(b"sec0nd")
    files = BlockFiles(tmp_path, DIGESTS, 3, 1)

    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    assert files.read(1) is None and not files.has(1)


def test_blocks_of_a_dataset_that_was_replaced_are_removed_an_hour_later(tmp_path):
    for name in ("replaced", "just replaced", "current"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0").write_bytes(b"first")
    for name in ("replaced", "current"):
        os.utime(tmp_path / name, (0, 0))
    remove_replaced(tmp_path / "current")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "just replaced"]
    remove_replaced(tmp_path / "of a new cache" / "current")


def test_blocks_that_a_run_still_reads_are_not_removed(tmp_path):
    for name in ("replaced", "abandoned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0").write_bytes(b"first")
    files = BlockFiles(tmp_path / "replaced", DIGESTS, 3, 1)
    for name in ("replaced", "abandoned"):
        os.utime(tmp_path / name, (0, 0))  # all blocks were written long ago
    remove_replaced(tmp_path / "current")
    assert [path.name for path in tmp_path.iterdir()] == ["replaced"]
    assert files.read(0) == b"first"
    assert (tmp_path / "replaced").stat().st_mtime > 0  # seen by hosts that do not see the lock
    os.utime(tmp_path / "replaced", (0, 0))
    del files
    remove_replaced(tmp_path / "current")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_held_by_the_time_of_reading(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("graphtrain.run.streaming.block_files.fcntl.flock", refuse)
    (tmp_path / "replaced").mkdir()
    (tmp_path / "replaced" / "0").write_bytes(b"first")
    os.utime(tmp_path / "replaced", (0, 0))
    files = BlockFiles(tmp_path / "replaced", DIGESTS, 3, 1)
    os.utime(tmp_path / "replaced", (0, 0))
    assert files.read(0) == b"first"
    remove_replaced(tmp_path / "current")
    assert files.read(0) == b"first"
    os.utime(tmp_path / "replaced", (0, 0))
    remove_replaced(tmp_path / "current")
    assert files.read(0) is None
