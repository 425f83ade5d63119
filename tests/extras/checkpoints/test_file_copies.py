"""Copies of the files of a run in an object store (`run.upload`)."""

import json
from pathlib import Path

import pytest

from graphtrain.cache.remote import ObjectStore
from graphtrain.checkpoints.file_copies import FileCopies
from graphtrain.errors import CacheError

pytest.importorskip("obstore")


@pytest.fixture
def run(tmp_path) -> Path:
    run = tmp_path / "run"
    for folder in ("tensorboard", "profiles/1-2/rank-0", "dumps/.one.unfinished", "checkpoints/3"):
        (run / folder).mkdir(parents=True)
        (run / folder / "file").write_text(folder)
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    (run / "own.txt").write_text("mine")
    return run


def stored(store: Path) -> dict[str, str]:
    paths = (path for path in store.rglob("*") if path.is_file())
    return {path.relative_to(store).as_posix(): path.read_text() for path in paths}


def test_files_of_a_run_are_uploaded_with_whole_lines_and_only_when_they_changed(run, tmp_path):
    store = tmp_path / "store"
    copies = FileCopies(run, str(store))
    assert copies.upload_changed() > 0
    assert stored(store) == {
        "run/metrics.jsonl": '{"step": 1}\n',
        "run/tensorboard/file": "tensorboard",
        "run/profiles/1-2/rank-0/file": "profiles/1-2/rank-0",
    }
    assert copies.upload_changed() == 0
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert copies.upload_changed() == 24
    assert stored(store)["run/metrics.jsonl"] == '{"step": 1}\n{"step": 2}\n'


def test_another_directory_replaces_nothing_and_a_later_start_uses_its_folder_again(run, tmp_path):
    store, other = tmp_path / "store", tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("{}\n")
    FileCopies(run, str(store)).upload_changed()
    FileCopies(other, str(store)).upload_changed()
    for _ in range(2):
        FileCopies(run, str(store)).upload_changed()
        (other / "metrics.jsonl").write_text("{}\n{}\n")
        FileCopies(other, str(store)).upload_changed()
    contents = stored(store)
    assert contents["run/metrics.jsonl"] == '{"step": 1}\n'
    assert contents["run-2/metrics.jsonl"] == "{}\n{}\n"
    assert {name.partition("/")[0] for name in contents} == {"run", "run-2"}
    # A record that is damaged, or of another store, names no folder of this one.
    (other / "upload.json").write_text('{"remote": 3, "folder": "../elsewhere"}')
    FileCopies(other, str(store)).upload_changed()
    assert json.loads((other / "upload.json").read_text())["folder"] == "run-3"


def test_half_of_the_requests_fail_and_every_byte_arrives(network, run, tmp_path):
    (run / "tensorboard/events").write_bytes(bytes(range(256)) * (20 << 12))  # in parts
    network.share = 0.5
    url = f"s3://runs/{tmp_path.name}"
    FileCopies(run, url).upload_changed()
    assert network.met["passed"] < network.met.total()
    network.share = 0.0
    store = ObjectStore(url)
    names = sorted(store.names("run/"))
    assert len(names) == 4
    content = store.get("run/tensorboard/events", 1 << 30)
    assert content == (run / "tensorboard/events").read_bytes()


def test_what_a_failed_upload_left_out_is_uploaded_by_the_next_one(network, run, tmp_path):
    url = f"s3://runs/{tmp_path.name}"
    network.faults = ("error",)
    network.fails = lambda request: "PUT" in request and "/profiles/" in request
    copies = FileCopies(run, url, retry_seconds=0.3)
    with pytest.raises(CacheError, match=r"cannot write s3://.*/run/profiles/"):
        copies.upload_changed()
    network.fails = None
    assert copies.upload_changed() == len("profiles/1-2/rank-0")
    assert len(list(ObjectStore(url).names("run/"))) == 3


def test_a_file_that_cannot_be_read_keeps_back_no_other(run, tmp_path, monkeypatch):
    def copy(source, destination):
        if source.name == "metrics.jsonl":
            raise PermissionError(13, "Permission denied", str(source))
        destination.write_bytes(source.read_bytes())

    monkeypatch.setattr("graphtrain.checkpoints.file_copies.shutil.copyfile", copy)
    copies = FileCopies(run, str(tmp_path / "store"))
    with pytest.raises(PermissionError):
        copies.upload_changed()
    assert len(stored(tmp_path / "store")) == 2


def test_only_the_files_of_one_folder_are_uploaded_where_asked(run, tmp_path):
    (run / "dumps/one").mkdir()
    (run / "dumps/one/dump.json").write_text("{}")
    FileCopies(run, str(tmp_path / "store")).upload_changed(only="dumps/one/")
    assert list(stored(tmp_path / "store")) == ["run/dumps/one/dump.json"]


def test_a_folder_that_is_pushed_is_never_half_of_two(network, run, tmp_path):
    folder, store = run / "hf-3", ObjectStore(f"s3://runs/{tmp_path.name}")
    copies = FileCopies(run, store.url, retry_seconds=0.3)
    folder.mkdir()
    for name in ("a.safetensors", "config.json", "model.safetensors", "record.json"):
        (folder / name).write_text("1")
    assert copies.upload_folder("hf-3", record="record.json", last="config.json")
    assert not copies.upload_folder("hf-3", record="record.json", last="config.json")
    for path in folder.iterdir():
        path.write_text("2")
    network.faults = ("error",)
    network.fails = lambda request: "PUT" in request and "/model.safetensors" in request
    with pytest.raises(CacheError, match=r"cannot write s3://.*/run/hf-3/model"):
        copies.upload_folder("hf-3", record="record.json", last="config.json")
    network.fails = None
    assert store.get("run/hf-3/config.json", 9) is None
    assert copies.upload_folder("hf-3", record="record.json", last="config.json")
    assert {store.get(name, 9) for name in store.names("run/hf-3/")} == {b"2"}
