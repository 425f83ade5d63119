"""Checkpoints on a real S3 server behind a network that fails half of the requests."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from graphtrain.cache.remote import ObjectStore
from graphtrain.checkpoints import remote_manifest
from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.checkpoints.listing import list_remote, superfluous, verify_remote
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.remote_manifest import DamagedRemoteCheckpoint, decode_manifest
from graphtrain.checkpoints.steps import Retention, saved_steps
from graphtrain.errors import CacheError, TrainingError

pytest.importorskip("obstore")


@pytest.fixture
def url(tmp_path) -> str:
    return f"s3://runs/{tmp_path.name}"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with two checkpoints of 20 MB, so that a file is sent and read in parts."""
    import jax

    run = tmp_path_factory.mktemp("trained") / "run"
    checkpoints = Checkpoints(run / "checkpoints", Retention(9))
    for step in (1, 2):
        random = np.random.default_rng(step).standard_normal(5_000_000, np.float32)
        records = {"journal": {"bytes": 30 * step, "sha256": ""}, "validation_loss": 1.0 / step}
        checkpoints.save(step, {"parameters": jax.device_put(random)}, {"step": step}, **records)
    checkpoints.close()
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 2.000000000}}\n'[:29] + "\n"
                                               for n in range(1, 4)))  # fmt: skip
    (run / "config.toml").write_text("# of the run\n")
    (run / "hugging_face").mkdir()
    (run / "hugging_face/tokenizer.json").write_text("{}")
    return run


def contents(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def objects(buckets: Path, url: str, kind: str) -> list[Path]:
    return [path for path in (buckets / url[5:] / "v1" / kind).rglob("*") if path.is_file()]


def test_half_of_the_requests_fail_and_every_byte_comes_back(network, buckets, url, run, tmp_path):
    network.share = 0.5
    remote = RemoteCheckpoints(url)
    remote.upload(run, 2)
    assert remote.steps() == [2] and verify_remote(remote, 2) is None
    copy = tmp_path / "copy"
    remote.download(2, copy)
    assert network.met["passed"] < network.met.total() and min(network.met.values()) > 0
    assert contents(copy / "checkpoints/2") == contents(run / "checkpoints/2")
    assert (copy / "hugging_face/tokenizer.json").read_text() == "{}"
    assert (copy / "config.toml").read_text() == "# of the run\n"
    assert (copy / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()[:60]
    with pytest.raises(TrainingError, match="exists already"):
        remote.download(2, copy)
    remote.delete(2)
    assert remote.steps() == [] and not objects(buckets, url, "files")


def test_files_of_a_run_are_kept_and_its_metrics_continued(network, url, run, tmp_path):
    remote = RemoteCheckpoints(url)
    remote.upload(run, 2)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.toml").write_text("# mine")
    metrics = (run / "metrics.jsonl").read_bytes()
    for present, expected in ((metrics[:30], metrics[:60]), (b"others\n", b"others\n")):
        (copy / "metrics.jsonl").write_bytes(present)
        remote.download(2, copy)
        assert (copy / "metrics.jsonl").read_bytes() == expected
        shutil.rmtree(copy / "checkpoints")
    assert (copy / "config.toml").read_text() == "# mine"


def test_an_upload_that_breaks_off_leaves_no_step_and_the_next_one_completes_it(
    network, buckets, url, run, monkeypatch
):
    broken, remote = RemoteCheckpoints(url, retry_seconds=0.3), RemoteCheckpoints(url)
    # The manifest cannot be written: everything else is there, and the step does not exist.
    network.fails = lambda request: "PUT" in request and "/v1/steps/" in request
    with pytest.raises(CacheError, match=r"cannot write s3://.*/v1/steps/1.json"):
        broken.upload(run, 1)
    assert len(objects(buckets, url, "files")) > 5 and remote.steps() == []
    network.fails = lambda request: "PUT" in request and "/state/" in request
    with pytest.raises(CacheError, match=r"cannot write s3://.*/v1/files/1-"):
        broken.upload(run, 1)
    network.fails = None
    assert remote.steps() == [] and not remote.has(run, 1)
    remote.upload(run, 1)
    assert remote.has(run, 1) and verify_remote(remote, 1) is None
    # What was left is removed a day later, the complete checkpoint is not.
    assert remote.unfinished() == {}
    future = remote_manifest.time.time() + 25 * 3600
    monkeypatch.setattr("graphtrain.checkpoints.remote.time.time", lambda: future)
    rests = remote.unfinished()
    assert len(rests) == 2
    for names in rests.values():
        remote.delete_objects(names)
    assert remote.unfinished() == {} and verify_remote(remote, 1) is None


def test_damage_is_named_and_nothing_of_it_is_installed(network, buckets, url, run, tmp_path):
    remote = RemoteCheckpoints(url, retry_seconds=0.3)
    remote.upload(run, 1)
    largest = max(objects(buckets, url, "files"), key=lambda path: path.stat().st_size)
    name, sound = largest.relative_to(buckets / url[5:]).as_posix(), largest.read_bytes()
    flipped = sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:]
    store = ObjectStore(url)  # not the file: the server remembers its size
    damages = [
        (lambda: store.put(name, flipped), "does not have the digest"),
        (lambda: store.put(name, sound[:-9]), " bytes instead of "),
        (lambda: store.delete(name), "is missing"),
    ]
    for damage, reason in damages:
        damage()
        assert reason in (verify_remote(remote, 1) or "intact")
        with pytest.raises(DamagedRemoteCheckpoint, match=reason):
            remote.download(1, tmp_path / "copy")
        assert not saved_steps(tmp_path / "copy/checkpoints")
        assert not list((tmp_path / "copy/checkpoints").iterdir())
    manifest = store.get("v1/steps/1.json", 1 << 20) or b""
    store.put("v1/steps/1.json", manifest.replace(b'"step": 1', b'"step": 2'))
    assert [one.status for one in list_remote(remote)] == ["damaged"]


def test_a_manifest_never_names_a_file_outside_of_its_directory():
    entry = {"size": 1, "sha256": "0" * 64}
    for name in ("../../../etc/passwd", "/etc/passwd", "a/../b", "a//b", ".", "", "a\\b"):
        content = {
            "version": 1, "step": 1, "uploaded_at": "", "prefix": "v1/files/1-1-00000000",
            "checkpoint": {name: entry}, "run": {}, "validation_loss": None,
        }  # fmt: skip
        digest = remote_manifest.json_digest(content)
        with pytest.raises(ValueError, match="wrong entry"):
            decode_manifest(json.dumps(content | {"digest": digest}).encode(), 1)


def test_the_best_and_the_newest_are_kept_and_a_deletion_that_breaks_off_leaves_none_half(
    network, buckets, url, run
):
    remote = RemoteCheckpoints(url, retry_seconds=0.3)
    for step in (1, 2):
        remote.upload(run, step)
    assert superfluous(list_remote(remote), Retention(1)) == [1]
    assert superfluous(list_remote(remote), Retention(1, every=1)) == []
    network.fails = lambda request: "DELETE" in request and "/v1/files/" in request
    network.fails = lambda request: (
        request.startswith(("DELETE", "POST")) and "v1/steps" not in request
    )
    with pytest.raises(CacheError, match="cannot delete"):
        remote.delete(1)
    network.fails = None
    assert remote.steps() == [2] and verify_remote(remote, 2) is None


def test_a_checkpoint_that_is_damaged_here_is_never_uploaded(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    path = max((copy / "checkpoints/2/state").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    remote = RemoteCheckpoints(str(tmp_path / "store"), create=True)
    with pytest.raises(DamagedCheckpoint, match=f"{path.name} does not have the digest"):
        remote.upload(copy, 2)
    assert remote.steps() == []
    remote.upload(copy, 1)
    assert remote.has(copy, 1) and not remote.has(copy, 2)
    # Trained again from an earlier step, the same step is another checkpoint.
    (copy / "checkpoints/1/manifest.json").write_text("{}")
    assert not remote.has(copy, 1)
