"""Work of a host: counted, it falls with the number of hosts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.batches.loader import Loader
from graphtrain.data.batches.rows import PackingSettings
from graphtrain.data.batches.sources import SourceDataset
from graphtrain.data.indexed.dataset import IndexedDataset, IndexShare
from graphtrain.errors import DataError

ROWS, LENGTH, STEPS = 16, 24, 10


class CountedTokens:
    """Tokens of a dataset that count how many of them are read."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens, self.read = tokens, 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, where: Any) -> np.ndarray:
        found = self._tokens[where]
        self.read += len(found)
        return found


@pytest.fixture(scope="module")
def prefix(make_dataset):
    sizes = np.random.default_rng(0).integers(2, LENGTH + 2, size=600)
    return make_dataset([list(range(1, size + 1)) for size in sizes], 100)


@pytest.fixture
def counted(monkeypatch) -> list[CountedTokens]:
    """Count the tokens of all datasets that a test opens."""
    found: list[CountedTokens] = []
    opened = IndexedDataset.__init__

    def open_counted(self, *args: Any, **options: Any) -> None:
        opened(self, *args, **options)
        self.tokens = CountedTokens(self.tokens)
        found.append(self.tokens)

    monkeypatch.setattr(IndexedDataset, "__init__", open_counted)
    return found


def tokens_read(counted: list[CountedTokens], prefix: str, host: int, hosts: int, **options) -> int:
    """Return how many tokens a host reads for some batches; it holds consecutive rows."""
    counted.clear()
    rows = np.arange(host * ROWS // hosts, (host + 1) * ROWS // hosts)
    share = IndexShare(host, hosts)
    settings = {"seq_len": LENGTH, "rows": rows, "index_share": share, **options}
    loader = Loader(prefix, global_batch_size=ROWS, seed=1, **settings)
    for step in range(STEPS):
        assert len(loader._batches[step]["tokens"]) == len(rows)
    batches = list(evaluation_batches(prefix, batch_size=ROWS, **settings))
    assert len(batches) > 5
    return sum(one.read for one in counted)


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": "best_fit", "isolate_documents": True}, {"packing": "pad"}],
    ids=["concat", "best_fit", "pad"],
)
def test_hosts_together_read_what_one_host_reads(monkeypatch, counted, prefix, options):
    monkeypatch.setattr(Loader, "_start", lambda self, step: None)  # no thread reads ahead
    whole = tokens_read(counted, prefix, 0, 1, **options)
    for hosts in (2, 4, 8):
        read = [tokens_read(counted, prefix, host, hosts, **options) for host in range(hosts)]
        assert sum(read) == whole
        assert max(read) < 1.3 * whole / hosts, read


def test_each_entry_of_an_index_is_checked_by_one_host(make_dataset):
    documents = [[1, 2, 3]] * 64
    prefix = make_dataset(documents, 10)
    path, sound = Path(f"{prefix}.idx"), Path(f"{prefix}.idx").read_bytes()
    pointers = len(sound) - 65 * 8 - 64 * 8
    found = np.zeros((8, 64), bool)
    for document in range(64):
        damaged = bytearray(sound)
        damaged[pointers + 8 * document] ^= 1
        path.write_bytes(damaged)
        for host in range(8):
            try:
                IndexedDataset(prefix, share=IndexShare(host, 8), one_sequence_each=True)
            except DataError:
                found[host, document] = True
    np.testing.assert_array_equal(found.sum(axis=0), 1)
    np.testing.assert_array_equal(found.sum(axis=1), 8)


def test_only_masks_of_documents_that_may_be_cut_are_read_at_the_start():
    read: list[int] = []

    class Source:
        digest, sizes = "1", [10, 60, 8, 41, 40]

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            read.append(index)
            tokens = np.ones(self.sizes[index], np.int64)
            return tokens, np.arange(len(tokens)) >= 50

    settings = PackingSettings(
        length=40, packing="pad", overlong="truncate", sources={"source": Source()}
    )
    with pytest.warns(UserWarning, match="are cut"):
        packed = settings.open("source")
    assert set(read) - {0} == {1, 3} and isinstance(packed.dataset, SourceDataset)
    # Of documents 1 and 3 no target remains; document 3 has none at all.
    assert [packed.documents(row).tolist() for row in range(len(packed))] == [[0], [2], [4]]
