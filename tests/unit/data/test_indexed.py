import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.indexed.dataset import IndexedDataset, IndexShare, token_dtype
from graphtrain.data.indexed.writer import IndexedWriter
from graphtrain.errors import DataError

DOCUMENTS = [[1, 2, 3], [], [4, 5], [65000]]
HEADER = 34  # bytes


def read_independently(prefix: str) -> list[list[int]]:
    """Parse the format with nothing but struct."""
    index = Path(f"{prefix}.idx").read_bytes()
    tokens = Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, boundaries = struct.unpack("<QBQQ", index[9:HEADER])
    assert (version, boundaries) == (1, sequences + 1)
    letter, width = {8: ("H", 2), 4: ("i", 4)}[code]
    body = struct.unpack(f"<{sequences}i{sequences}q{boundaries}q", index[HEADER:])
    sizes, pointers = body[:sequences], body[sequences : 2 * sequences]
    assert list(body[2 * sequences :]) == list(range(boundaries))
    return [
        list(struct.unpack(f"<{size}{letter}", tokens[start : start + size * width]))
        for size, start in zip(sizes, pointers, strict=True)
    ]


def overwrite(path: str, place: int, value: bytes) -> None:
    with Path(path).open("r+b") as file:
        file.seek(place)
        file.write(value)


documents_strategy = st.lists(st.lists(st.integers(0, 300), max_size=20), max_size=20).filter(any)


@given(documents=documents_strategy, vocab=st.sampled_from([301, 65499, 65500, 128256]))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_what_megatron_and_we_read(make_dataset, documents, vocab):
    prefix = make_dataset(documents, vocab)
    dataset = IndexedDataset(prefix)
    assert read_independently(prefix) == documents
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == documents
    assert dataset.tokens.tolist() == [token for document in documents for token in document]
    assert dataset.dtype == token_dtype(vocab)


def test_vocabularies_below_65500_take_two_bytes_per_token():
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_documents_of_several_sequences_are_read_whole(make_dataset):
    prefix = make_dataset([[1], [2, 3], [4]], 10)
    overwrite(f"{prefix}.idx", 26, struct.pack("<Q", 3))
    boundaries = HEADER + 3 * 12
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.truncate(boundaries)
        file.seek(boundaries)
        file.write(struct.pack("<3q", 0, 2, 3))
    dataset = IndexedDataset(prefix)
    assert [dataset.document(i).tolist() for i in range(2)] == [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"X", r"train\.idx: bytes 0 to 8 are .*not the index of a Megatron dataset"),
        (9, b"\x02", r"train\.idx: byte 9: version 2 is not supported, only 1"),
        (17, b"\x09", r"train\.idx: byte 17: dtype code 9 \(unknown\)"),
        (17, b"\x07", r"train\.idx: byte 17: dtype code 7 \(float32\)"),
        (17, b"\x04", r"byte 58: sequence 1 has byte offset 6 in the .bin, but .* to 12 bytes"),
        (18, b"\x05", r"train\.idx: is 122 bytes long, but its header .* needs 134"),
        (HEADER, b"\xff\xff\xff\xff", r"byte 34: sequence 0 has a length of -1 tokens"),
        (HEADER, b"\x02", r"byte 58: sequence 1 has byte offset 6 in the .bin, but .* to 4 bytes"),
        (HEADER + 12, b"\x03", r"train\.bin: is 12 bytes long, but train\.idx counts 8 tokens"),
        (HEADER + 48, b"\x01", r"byte 82: the document boundaries do not increase from 0 to 4"),
    ],
)
def test_a_damaged_index_names_the_file_and_the_byte(make_dataset, place, value, message):
    prefix = make_dataset(DOCUMENTS, 65001)
    overwrite(f"{prefix}.idx", place, value)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("place", "finder", "message"),
    [
        (HEADER + 16, 0, "byte 50: sequence 0 has byte offset 1 "),
        (HEADER + 40, 1, "byte 74: sequence 3 has byte offset "),
        (HEADER + 48, 0, "byte 82: the document boundaries do not increase from 0 to 4"),
        (HEADER + 80, 1, "byte 82: the document boundaries do not increase from 0 to 4"),
    ],
)
def test_processes_divide_the_check_of_an_index(make_dataset, place, finder, message):
    prefix = make_dataset(DOCUMENTS, 65001)
    overwrite(f"{prefix}.idx", place, b"\x01")
    shares = [IndexShare(rank, 2) for rank in (0, 1)]
    with pytest.raises(DataError, match=re.escape(message)):
        IndexedDataset(prefix, share=shares[finder], one_sequence_each=True)
    other = IndexedDataset(prefix, share=shares[1 - finder], one_sequence_each=True)
    assert [other.document(i).tolist() for i in range(4)] == DOCUMENTS


@given(length=st.integers(0, 30), processes=st.integers(1, 9))
def test_shares_of_an_index_are_all_of_it(length, processes):
    items = list(range(length))
    shares = (items[IndexShare(rank, processes).of(length)] for rank in range(processes))
    assert [item for share in shares for item in share] == items


def test_documents_of_several_sequences_are_refused_where_each_must_be_one(make_dataset):
    prefix = make_dataset([[1], [2, 3], [4]], 10)
    overwrite(f"{prefix}.idx", HEADER + 3 * 12 + 8, struct.pack("<q", 2))
    assert len(IndexedDataset(prefix)) == 3
    with pytest.raises(DataError, match="the document boundaries do not increase"):
        IndexedDataset(prefix, one_sequence_each=True)


@given(place=st.integers(0, HEADER - 1), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_every_flipped_bit_of_the_header_is_noticed(make_dataset, place, bit):
    prefix = make_dataset(DOCUMENTS, 65001)
    byte = Path(f"{prefix}.idx").read_bytes()[place]
    overwrite(f"{prefix}.idx", place, bytes([byte ^ 1 << bit]))
    with pytest.raises(DataError, match=r"train\.idx"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("ending", ["bin", "idx"])
@given(share=st.floats(0, 0.99))
@settings(max_examples=20, deadline=None)
def test_a_truncated_file_is_noticed(make_dataset, ending, share):
    prefix = make_dataset(DOCUMENTS, 65001)
    path = Path(f"{prefix}.{ending}")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match=rf"train\.{ending}: "):
        IndexedDataset(prefix)


def test_a_missing_file_says_what_to_run(tmp_path):
    with pytest.raises(DataError, match=r"train\.bin: no such file; .*graphtrain data prepare"):
        IndexedDataset(tmp_path / "train")


def test_a_prefix_with_an_ending_says_how_to_name_it(make_dataset):
    prefix = make_dataset(DOCUMENTS, 65001)
    with pytest.raises(DataError, match=r"without its suffix: .*train$"):
        IndexedDataset(f"{prefix}.bin")


@pytest.mark.parametrize("documents", [[], [[]]])
def test_a_dataset_without_tokens_is_empty(make_dataset, documents):
    with pytest.raises(DataError, match=r"train\.idx: the dataset is empty"):
        IndexedDataset(make_dataset(documents, 10))


def test_modes_of_a_multimodal_dataset_are_refused(make_dataset):
    prefix = make_dataset(DOCUMENTS, 65001)
    with Path(f"{prefix}.idx").open("ab") as file:
        file.write(bytes(len(DOCUMENTS)))
    with pytest.raises(DataError, match="modes of a multimodal dataset"):
        IndexedDataset(prefix)


def test_a_failed_write_leaves_the_old_dataset_and_nothing_else(make_dataset):
    prefix = make_dataset(DOCUMENTS, 65001)
    files = {path: path.read_bytes() for path in Path(prefix).parent.iterdir()}
    with pytest.raises(RuntimeError), IndexedWriter(prefix, 65001) as writer:
        writer.append(np.array([7, 8]))
        raise RuntimeError
    assert {path: path.read_bytes() for path in Path(prefix).parent.iterdir()} == files


def test_a_token_outside_the_vocabulary_is_not_written(tmp_path):
    with (
        pytest.raises(ValueError, match="vocabulary of 10"),
        IndexedWriter(tmp_path / "x", 10) as w,
    ):
        w.append(np.array([3, 10]))
    assert not list(tmp_path.iterdir())
