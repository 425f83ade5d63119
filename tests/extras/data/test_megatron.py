"""megatron-core reads what we write, and we read what it writes, token for token."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.loss_spans import LossSpans
from graphtrain.data.prepare.instructions import instruct

# In a process of its own: importing megatron-core warns, and takes torch.
PROGRAM = """
import json, sys
import numpy, torch
from megatron.core.datasets import indexed_dataset as megatron
place, documents = sys.argv[1], json.load(open(sys.argv[2]))
read = {}
for name in ("small", "large", "chats", "chats_learned"):
    dataset = megatron.IndexedDataset(f"{place}/{name}")
    read[name] = {
        "documents": [dataset[i].tolist() for i in range(len(dataset))],
        "indices": dataset.document_indices.tolist(),
        "dtype": dataset.index.dtype.__name__,
    }
json.dump(read, open(f"{place}/read.json", "w"))
for name, dtype in (("small", numpy.uint16), ("large", numpy.int32)):
    builder = megatron.IndexedDatasetBuilder(f"{place}/theirs-{name}.bin", dtype=dtype)
    for document in documents[name]:
        # As two sequences, which Megatron's own preprocessing makes where it splits sentences.
        for part in (document[:3], document[3:]):
            if part:
                builder.add_item(torch.tensor(part))
        builder.end_document()
    builder.finalize(f"{place}/theirs-{name}.idx")
"""


@pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="megatron-core is not installed here"
)
def test_megatron_core_and_graphtrain_read_one_another(tmp_path):
    from graphtrain.data.indexed.writer import IndexedWriter

    random = np.random.default_rng(0)
    documents = {
        name: [random.integers(0, vocab, size).tolist() for size in random.integers(1, 40, 60)]
        for name, vocab in (("small", 65_499), ("large", 200_000))
    }
    for name, vocab in (("small", 65_499), ("large", 200_000)):
        with IndexedWriter(tmp_path / name, vocab) as writer:
            for document in documents[name]:
                writer.append(np.array(document))
    _write_conversations(tmp_path)
    (tmp_path / "documents.json").write_text(json.dumps(documents))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "documents.json")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr

    read = json.loads((tmp_path / "read.json").read_text())
    assert {name: each["dtype"] for name, each in read.items()} == {
        "small": "uint16",
        "large": "int32",
        "chats": "uint16",
        "chats_learned": "int32",
    }
    chats = IndexedDataset(tmp_path / "chats")
    learned = LossSpans(chats)
    assert read["chats"]["documents"] == [chats.document(i).tolist() for i in range(3)]
    assert read["chats_learned"]["documents"] == [
        learned.spans(i).ravel().tolist() for i in range(3)
    ]
    for name, want in documents.items():
        assert read[name]["documents"] == want
        assert read[name]["indices"] == list(range(61))
        theirs = IndexedDataset(tmp_path / f"theirs-{name}")
        assert [theirs.document(i).tolist() for i in range(len(theirs))] == want


def _write_conversations(place):
    """chats and chats_learned."""
    record = {"instruction": "a question", "output": "an answer", "history": [["one", "two"]]}
    (place / "chats.jsonl").write_text((json.dumps(record) + "\n") * 3)
    options = {"template": "chatml", "validation": 0}
    instruct([place / "chats.jsonl"], place / "made", "bytes", **options)
    for path in (place / "made").glob("train*.???"):
        path.rename(place / path.name.replace("train", "chats"))
