"""Datasets in an object store give the batches of local ones, through failures and restarts."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage import Network  # pyright: ignore[reportMissingImports]

from graphtrain.cache.remote import ObjectStore
from graphtrain.config.schema import Data, StreamSettings
from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.batches.loader import Loader
from graphtrain.data.indexed import blocks as block_module
from graphtrain.data.indexed.blocks import BlockDigests
from graphtrain.data.indexed.description import read_description, write_description
from graphtrain.data.prepare.instructions import instruct
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import CacheError, DataError
from graphtrain.run.streaming import local_index
from graphtrain.run.streaming import open as opening
from graphtrain.run.streaming.block_files import BlockFiles

pytest.importorskip("obstore")
BLOCK = 1 << 12


@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch):
    """Blocks of 4 KiB, so that a small dataset has many; nothing is open from another test."""
    monkeypatch.setattr(block_module, "_BLOCK", BLOCK)
    opening._open.cache_clear()
    yield
    opening._open.cache_clear()


def write_text(path: Path, salt: str = "") -> Path:
    texts = (f"{salt}document {number} " * (number % 40 + 1) for number in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A dataset of about 40 blocks with a validation set."""
    path = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_module, "_BLOCK", BLOCK)
        prepare([write_text(path / "text.jsonl")], path / "data", "bytes", validation=0.2)
    return path / "data"


@pytest.fixture
def stored(network: Network, prepared, tmp_path) -> str:
    """URL of a copy of the dataset."""
    url = f"s3://runs/{tmp_path.name}"
    upload(prepared, url)
    return url


def upload(directory: Path, url: str) -> None:
    store = ObjectStore(url)
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        store.put_file(path.name, path)


def settings(url: str, cache: Path, **changes) -> Data:
    stream = StreamSettings(**{"cache": str(cache), "timeout": 20.0} | changes)
    return Data(train=f"{url}/train", validation=f"{url}/validation", stream=stream)


def loader_of(data: Data, **changes) -> Loader:
    given: dict[str, Any] = {
        "global_batch_size": 4,
        "seq_len": 64,
        "seed": 3,
        "vocab": 300,
    } | changes
    return Loader(data.local.train, streams=opening.open_streams(data), **given)


def batches(loader: Loader, count: int) -> list[dict[str, np.ndarray]]:
    found = [next(loader) for _ in range(count)]
    loader.close()
    return found


def assert_same(found, expected) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def local_batches(prefix: Path, count: int, **changes):
    given: dict[str, Any] = {
        "global_batch_size": 4,
        "seq_len": 64,
        "seed": 3,
        "vocab": 300,
    } | changes
    return batches(Loader(prefix, **given), count)


def kept(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*.blocks/*/*") if path.name.isdigit()]


def test_batches_are_those_of_the_local_files_while_half_of_the_requests_fail(
    network: Network, prepared, stored, tmp_path
):
    network.share = 0.5
    data = settings(stored, tmp_path / "cache")
    assert_same(batches(loader_of(data), 40), local_batches(prepared / "train", 40))
    given: dict[str, Any] = {"batch_size": 4, "seq_len": 64}
    found = evaluation_batches(
        data.local.validation or "", streams=opening.open_streams(data), **given
    )
    assert_same(list(found), list(evaluation_batches(prepared / "validation", **given)))
    assert network.met["passed"] < network.met.total()


def test_a_host_fetches_only_the_blocks_of_its_rows(network, prepared, stored, tmp_path):
    data = settings(stored, tmp_path / "cache")
    rows = np.array([1])
    loader = loader_of(data, rows=rows)
    assert_same([next(loader)], local_batches(prepared / "train", 1, rows=rows))
    loader.close()
    blocks = -(-(prepared / "train.bin").stat().st_size // BLOCK)
    # A row, and those of the batches ahead of it; not all of the dataset.
    assert 0 < len(kept(tmp_path / "cache")) < blocks / 2


def test_a_resumed_loader_gives_the_same_batches_from_a_cache_that_a_kill_has_left(
    prepared, stored, tmp_path
):
    cache = tmp_path / "cache"
    data = settings(stored, cache)
    loader = loader_of(data)
    for _ in range(5):
        next(loader)
    state = loader.state()
    loader.close()
    whole, half, *_ = kept(cache)
    half.write_bytes(half.read_bytes()[:100])  # as after a crash of the machine
    whole.write_bytes(bytes(len(whole.read_bytes())))
    opening._open.cache_clear()
    again = loader_of(data)
    again.restore(state)
    assert_same(batches(again, 30), local_batches(prepared / "train", 35)[5:])


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_conversations_are_streamed_with_their_loss_masks(network: Network, tmp_path, packing):
    source = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]
    source.write_text(f"{json.dumps({'messages': turns})}\n" * 60)
    folder = tmp_path / "data"
    instruct([source], folder, "bytes", template="chatml", validation=0.2)
    upload(folder, f"s3://runs/{tmp_path.name}")
    data = settings(f"s3://runs/{tmp_path.name}", tmp_path / "cache")
    shape: dict[str, Any] = {"seq_len": 128, "packing": packing}
    assert_same(batches(loader_of(data, **shape), 8), local_batches(folder / "train", 8, **shape))


def test_the_cache_keeps_to_its_size(prepared, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_MEGABYTE", 4 * BLOCK)  # of cache_mb = 1: four blocks
    data = settings(stored, tmp_path / "cache", cache_mb=1)
    assert_same(batches(loader_of(data), 25), local_batches(prepared / "train", 25))
    end = time.monotonic() + 20  # of threads that write what was asked for ahead, and then remove
    while len(kept(tmp_path / "cache")) > 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert 0 < len(kept(tmp_path / "cache")) <= 4


def test_damage_is_refused_and_never_trained_on(prepared, stored, tmp_path):
    store, original = ObjectStore(stored), (prepared / "train.bin").read_bytes()
    store.put("train.bin", bytes(len(original)))
    with pytest.raises(DataError, match=r"train\.bin: the block at byte \d+ differs from its"):
        next(loader_of(settings(stored, tmp_path / "a")))
    store.put("train.bin", original[:-2])
    with pytest.raises(DataError, match="bytes instead of"):
        next(loader_of(settings(stored, tmp_path / "b")))
    store.delete("train.bin")
    with pytest.raises(DataError, match=r"train\.bin is missing"):
        next(loader_of(settings(stored, tmp_path / "c")))


def test_an_index_that_is_larger_than_its_dataset_allows_is_not_downloaded(
    prepared, stored, tmp_path
):
    tokens, documents = (getattr(read_description(prepared / "train"), name)
                         for name in ("tokens", "documents"))  # fmt: skip
    limit = 34 + 8 * (documents + 1) + 12 * tokens
    assert (prepared / "train.idx").stat().st_size < limit
    ObjectStore(stored).put("train.idx", bytes(limit + 1))
    with pytest.raises(CacheError, match=f"train.idx has {limit + 1} bytes, more than the {limit}"):
        loader_of(settings(stored, tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.idx*"))


def test_a_dataset_that_is_replaced_while_it_is_read_is_named(stored, tmp_path):
    loader = loader_of(settings(stored, tmp_path / "cache"))
    source = write_text(tmp_path / "other.jsonl", "other ")
    prepare([source], tmp_path / "other", "bytes", validation=0.2)
    upload(tmp_path / "other", stored)
    with pytest.raises(DataError, match="was replaced by another dataset while it was read"):
        batches(loader, 200)


def test_a_full_disk_costs_requests_and_no_batch(prepared, stored, tmp_path, monkeypatch):
    def refuse(self, content):
        if self.parent.parent.name.endswith(".blocks"):
            raise OSError(28, os.strerror(28))
        return write(self, content)

    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", refuse)
    data = settings(stored, tmp_path / "cache")
    with pytest.warns(UserWarning, match=r"No space left on device; blocks .* in memory"):
        found = batches(loader_of(data), 20)
    assert_same(found, local_batches(prepared / "train", 20))
    assert not kept(tmp_path / "cache")


def test_a_store_that_is_away_for_a_while_delays_a_batch(network, prepared, stored, tmp_path):
    data = settings(stored, tmp_path / "cache", timeout=30.0)
    loader = loader_of(data)
    network.fails = lambda request: True
    threading.Timer(1.5, lambda: setattr(network, "fails", lambda request: False)).start()
    began = time.monotonic()
    found = batches(loader, 30)
    assert time.monotonic() - began > 1
    assert_same(found, local_batches(prepared / "train", 30))


def test_requests_that_hang_are_asked_again(network, prepared, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(local_index, "_READ_TIMEOUT", 0.3)
    loader = loader_of(settings(stored, tmp_path / "cache"))
    network.share, network.faults = 0.2, ("hang",)
    assert_same(batches(loader, 30), local_batches(prepared / "train", 30))
    assert network.met["hang"]


def test_a_store_that_stays_away_ends_the_run(network, stored, tmp_path):
    loader = loader_of(settings(stored, tmp_path / "cache", timeout=0.5))
    network.fails = lambda request: True
    with pytest.raises(CacheError, match="cannot read"):
        batches(loader, 100)


def test_what_cannot_be_streamed_says_so(prepared, stored, tmp_path):
    store, data = ObjectStore(stored), settings(stored, tmp_path / "cache")
    with pytest.raises(DataError, match=r"nothing\.json: no such object; upload the directory"):
        opening.open_streams(data.only(f"{stored}/nothing"))
    original = (prepared / "train.json").read_bytes()
    for changes, says in (
        ({"blocks": None}, "has no digests of blocks.*graphtrain data merge"),
        ({"tokenizer_file": "../../x"}, "is not the name of a file beside it"),
        (
            {"images": {"height": 2, "width": 2, "token": 1, "tokens": 1, "processor_digest": "1"}},
            "has images, which are not streamed; .* graphtrain data pull",
        ),
        (
            {"blocks": {"block_bytes": BLOCK, "digests": "AAAA"}},
            "digests of its blocks are damaged",
        ),
    ):
        fields = {**json.loads(original), **changes}
        fields.pop("digest")
        store.put("train.json", json.dumps(fields).encode())
        with pytest.raises(DataError, match=says):
            opening.open_streams(data)
    store.put("train.json", original.replace(b":", b";", 1))
    with pytest.raises(DataError, match=r"s3://.*/train\.json: not the description .*upload its"):
        opening.open_streams(data)
    store.put("train.json", original)
    store.put("train.idx", (prepared / "train.idx").read_bytes()[:-8] + bytes(8))
    with pytest.raises(DataError, match=r"train\.idx: its digest differs"):
        opening.open_streams(settings(stored, tmp_path / "another"))


def test_two_processes_share_a_directory_of_blocks(tmp_path):
    contents = [bytes([number]) * 16 for number in range(6)]
    digests = [block_module.block_digest(one) for one in contents]
    one, other = (BlockFiles(tmp_path, digests, most=3, in_memory=1) for _ in range(2))
    for number in range(6):
        one.keep(number, contents[number])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5"]
    assert other.read(4) == contents[4] and other.read(0) is None
    (tmp_path / "5").unlink()  # by another process
    assert one.has(5) and one.read(5) is None and not one.has(5)


def test_descriptions_have_a_digest_of_every_block(prepared, tmp_path):
    description = read_description(prepared / "train")
    assert description is not None and description.blocks is not None
    content = (prepared / "train.bin").read_bytes()
    parts = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    assert description.blocks.decode() == [block_module.block_digest(one) for one in parts]
    for path in prepared.glob("train.*"):
        shutil.copy(path, tmp_path)
    assert write_description(tmp_path / "train", description).blocks == description.blocks


def test_blocks_of_large_files_are_larger(tmp_path, monkeypatch):
    monkeypatch.setattr(block_module, "_MAX_BLOCKS", 3)
    (tmp_path / "a").write_bytes(bytes(4 * BLOCK))
    digests = BlockDigests.of(tmp_path / "a")
    assert digests.block_bytes == 2 * BLOCK and len(digests.decode()) == 2
