"""Preparation on a Ray cluster: the same bytes as on one machine."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graphtrain.data.prepare import ray_workers
from graphtrain.data.prepare.instructions import instruct
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import DataError

ray = pytest.importorskip("ray", reason="Ray is not installed")
# Ray starts its processes by a fork, which JAX, that other tests have imported, warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*os.fork:RuntimeWarning")


@pytest.fixture(scope="module")
def cluster():
    """A cluster of this machine with four workers, to which this process is connected."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield "auto"
    ray.shutdown()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Text of some chunks of a megabyte."""
    path = tmp_path_factory.mktemp("texts") / "text.jsonl"
    with path.open("w") as file:
        for number in range(6000):
            file.write(json.dumps({"text": f"document {number} " * 50}) + "\n")
    return path


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.is_file()
    }


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece:280"])
def test_a_cluster_gives_the_same_bytes(cluster, texts, tmp_path, tokenizer):
    prepare([texts], tmp_path / "one", tokenizer, workers=1)
    prepare([texts], tmp_path / "many", tokenizer, ray=cluster)
    found = digests(tmp_path / "many")
    assert found == digests(tmp_path / "one") and len(found) > 4
    again = prepare([texts], tmp_path / "many", tokenizer, workers=1)
    assert again.up_to_date


def test_chunks_are_encoded_at_the_same_time_and_come_in_order(cluster):
    def encode(chunk):
        time.sleep(0.3 if chunk % 2 else 0.1)  # later ones are ready first
        return chunk, os.getpid()

    chunks: Any = iter(range(8))
    results: Any = list(ray_workers.encode_on_cluster(chunks, encode, cluster, 4))
    assert [chunk for chunk, _ in results] == list(range(8))
    processes = {process for _, process in results}
    assert len(processes) > 1 and os.getpid() not in processes


def test_conversations_have_the_same_loss_masks(cluster, tmp_path):
    source = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]
    source.write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    settings: dict[str, Any] = {"template": "chatml", "validation": 0.2}
    for name, chosen in (("one", {"workers": 1}), ("many", {"ray": cluster})):
        instruct([source], tmp_path / name, "bytes", **settings, **chosen)
    assert digests(tmp_path / "one") == digests(tmp_path / "many")


def test_a_bad_record_is_named_as_on_one_machine(cluster, tmp_path):
    source = tmp_path / "bad.jsonl"
    source.write_text('{"text": "good"}\n{"other": 1}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl: line 2"):
        prepare([source], tmp_path / "data", "bytes", ray=cluster)
    assert not (tmp_path / "data" / "train.bin").exists()


def test_a_machine_with_other_code_is_refused(cluster, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_workers, "_environment", lambda: "python 2.7")
    with pytest.raises(DataError, match=r"a machine of the Ray cluster, has python 3.*same ver"):
        prepare([texts], tmp_path / "data", "bytes", ray=cluster)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://a:1", r"--ray ray://a:1: Ray Client is not supported.*--ray auto"),
        ("127.0.0.1:1", r"--ray 127\.0\.0\.1:1: cannot connect.*refused; start one"),
        ("127.0.0.1:99999", r"cannot connect.*; start one with ray start --head"),
        ("nonsense", r"cannot connect.*; start one with ray start --head"),
    ],
)
def test_an_address_without_a_cluster_is_refused(monkeypatch, texts, tmp_path, address, says):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(DataError, match=says):
        prepare([texts], tmp_path / "data", "bytes", ray=address)
    assert not (tmp_path / "data" / "train.bin").exists()


def test_the_command_starts_a_cluster_of_this_machine_and_ends_it(texts, tmp_path):
    prepare([texts], tmp_path / "one", "bytes", workers=1)
    words = ["data", "prepare", texts, "--output", tmp_path / "many", "--ray", "local"]
    command = [sys.executable, "-m", "graphtrain", *words, "--workers", "2"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "ray" not in ended.stderr.lower()
    assert digests(tmp_path / "many") == digests(tmp_path / "one")
