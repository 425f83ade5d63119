"""Tokens that are read by blocks are those of the file, and are asked for before they are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphtrain.config import load_config
from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.batches.loader import Loader
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.errors import ConfigError

BLOCK = 64  # bytes


class MemoryBlocks:
    """Blocks of a file in memory; notes which were asked for."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self.size, self.block_bytes = len(self._content), BLOCK
        self.asked: set[int] = set()
        self.unasked: set[int] = set()  # when they were read

    def prefetch(self, blocks: np.ndarray) -> None:
        self.asked |= set(blocks.tolist())

    def read(self, blocks: np.ndarray) -> list[bytes]:
        self.unasked |= set(blocks.tolist()) - self.asked
        return [self._content[BLOCK * one : BLOCK * (one + 1)] for one in blocks]


@pytest.fixture
def prefix(make_dataset) -> str:
    return make_dataset([[(7 * one + i) % 90 for i in range(one % 40)] for one in range(200)], 90)


def local(prefix: str) -> str:
    """The same dataset without its .bin."""
    path = Path(prefix)
    copy = path.with_name("elsewhere")
    copy.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes())
    return str(copy)


def test_ranges_and_positions_are_those_of_the_file(prefix):
    whole = IndexedDataset(prefix)
    blocks = MemoryBlocks(Path(f"{prefix}.bin"))
    streamed = IndexedDataset(local(prefix), blocks=blocks)
    assert len(streamed.tokens) == len(whole.tokens)
    for document in range(len(whole)):
        np.testing.assert_array_equal(streamed.document(document), whole.document(document))
    positions = np.random.default_rng(0).integers(len(whole.tokens), size=500)
    np.testing.assert_array_equal(streamed.tokens[positions], whole.tokens[positions])


@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
def test_batches_are_equal_and_no_block_is_read_that_was_not_asked_for_before(prefix, packing):
    blocks, other = MemoryBlocks(Path(f"{prefix}.bin")), local(prefix)
    settings: dict[str, Any] = {"seq_len": 48, "packing": packing, "rows": np.array([0, 2])}
    given: dict[str, Any] = {"global_batch_size": 4, "padding_sequences": 1, "seed": 1, **settings}
    loaders = Loader(prefix, **given), Loader(other, streams={other: blocks}, **given)
    for one, streamed in zip(*loaders, strict=True):
        if loaders[0].state()["step"] > 60:  # several epochs
            break
        for name in one:
            np.testing.assert_array_equal(one[name], streamed[name])
    for loader in loaders:
        loader.close()
    assert blocks.asked and not blocks.unasked

    blocks = MemoryBlocks(Path(f"{prefix}.bin"))  # no thread of the loader reads these
    passes = (
        list(evaluation_batches(one, batch_size=4, streams=streams, **settings))
        for one, streams in ((prefix, {}), (other, {other: blocks}))
    )
    for one, streamed in zip(*passes, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], streamed[name])
    assert blocks.asked and not blocks.unasked


def test_a_file_of_another_size_than_its_index_is_refused(prefix):
    blocks = MemoryBlocks(Path(f"{prefix}.bin"))
    blocks.size -= 2
    with pytest.raises(Exception, match=r"counts \d+ tokens"):
        IndexedDataset(local(prefix), blocks=blocks)


CONFIG = """
[program]
target = "cpu:1"
model = { layers = 1, embed = 8, heads = 1, mlp = 8, vocab = 300 }
batch = { global_batch_size = 1, seq_len = 8 }

[run]
directory = "run"
steps = 1
data = { train = "data/train" }
"""


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("ftp://host/a/train", "is in no store that datasets can be streamed from; write s3://"),
        ("s3://bucket", "names no dataset; write s3://BUCKET/FOLDER/train"),
        ("s3://bucket/folder/", "names no dataset"),
    ],
)
def test_urls_that_name_no_dataset_are_refused(place, says):
    with pytest.raises(ConfigError, match=says):
        load_config(CONFIG, [f"run.data.train={place}"])


def test_a_dataset_has_a_place_of_its_own_in_the_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    urls = ["s3://b/one/train", "gs://b/one/train", "s3://b/two/train"]
    data = [load_config(CONFIG, [f"run.data.train={url}"]).run.data for url in urls]
    data += [
        load_config(
            CONFIG, [f"run.data.train={urls[0]}", "run.data.stream.endpoint=http://x"]
        ).run.data
    ]
    places = [one.local.train for one in data]
    assert len(set(places)) == 4 and all(isinstance(one, str) for one in places)
    assert all(str(one).startswith("/cache/graphtrain/data/") for one in places)
    assert load_config(CONFIG).run.data.local.train == "data/train"


def test_a_vocabulary_does_not_follow_from_data_in_a_store():
    text = CONFIG.replace(", vocab = 300", "")
    with pytest.raises(ConfigError, match=r"is in an object store; set program\.model\.vocab"):
        load_config(text, ["run.data.train=s3://b/a/train"])
