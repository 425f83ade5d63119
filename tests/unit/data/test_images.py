"""Datasets with images: their files, and the batches that a loader makes of them."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.config.schema import BlendPart, Data
from graphtrain.data.batches.best_fit import best_fit, best_fit_with_images
from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.batches.loader import Loader
from graphtrain.data.batches.row_images import RowImages, image_problem
from graphtrain.data.batches.rows import PackingSettings
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import read_description, summary
from graphtrain.data.indexed.merge import merge
from graphtrain.data.indexed.verify import digest_problem, verify, verify_sample
from graphtrain.data.prepare.splits import _of_documents
from graphtrain.data.preview import packing_report
from graphtrain.errors import DataError
from graphtrain.run.data_check import DataCheck
from graphtrain.run.resume import _dataset_digest
from tests.small_datasets import write_image_dataset

TOKEN, TOKENS, SIZE = 255, 4, (2, 4)
LENGTH, ROWS = 24, 4
IMAGES = RowImages(images=2, height=2, width=4, token=TOKEN, tokens=TOKENS)


def make_documents(counts, seed=0):
    """Return documents with so many images; document i has the bytes i in text and pixels."""
    generator = np.random.default_rng(seed)
    return [
        (
            [index % 200 + 1]
            + [TOKEN] * TOKENS * count
            + [index % 200 + 1] * generator.integers(1, 9),
            generator.integers(0, 256, (count, *SIZE, 3)).astype(np.uint8),
        )
        for index, count in enumerate(counts)
    ]


DOCUMENTS = make_documents(np.random.default_rng(1).integers(0, 3, 40))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_image_dataset(tmp_path_factory.mktemp("images") / "train", DOCUMENTS)


def open_loader(prefix, **options):
    chosen = {"packing": "best_fit", "isolate_documents": True, "images": IMAGES} | options
    return Loader(prefix, global_batch_size=ROWS, seq_len=LENGTH, seed=5, **chosen)


def take(loader, count):
    batches = list(itertools.islice(loader, count))
    loader.close()
    return batches


def documents_of_row(row):
    """Return the number of each document of a row with its images, and the images that are left."""
    found, image = [], 0
    for segment in range(1, row["documents"].max() + 1):
        tokens = row["tokens"][row["documents"] == segment]
        count = int((tokens == TOKEN).sum()) // TOKENS
        found.append((int(tokens[0]) - 1, row["images"][image : image + count]))
        image += count
    return found, row["images"][image:]


def test_a_row_has_the_images_of_its_whole_documents_in_order_and_then_zeros(prefix):
    packed = PackingSettings(
        length=LENGTH, packing="best_fit", isolate_documents=True, images=IMAGES
    ).open(prefix)
    batch = packed.batch(range(len(packed)))
    assert batch["images"].shape == (len(packed), 2, *SIZE, 3)
    assert batch["images"].dtype == np.uint8
    seen = []
    for index in range(len(packed)):
        found, rest = documents_of_row({name: array[index] for name, array in batch.items()})
        assert not rest.any()
        for number, images in found:
            np.testing.assert_array_equal(images, DOCUMENTS[number][1])
            seen.append(number)
    assert sorted(seen) == list(range(len(DOCUMENTS)))
    assert not batch["weights"][batch["targets"] == TOKEN].any()
    assert len(packed) < len(DOCUMENTS)  # some rows have several documents


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_the_batches_are_equal_after_a_restart_and_on_any_hosts(prefix, packing):
    whole = take(open_loader(prefix, packing=packing), 12)
    loader = open_loader(prefix, packing=packing)
    list(itertools.islice(loader, 5))
    state = loader.state()
    loader.close()
    resumed = open_loader(prefix, packing=packing)
    resumed.restore(state)
    for got, want in zip(take(resumed, 7), whole[5:], strict=True):
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
    for host in range(2):
        rows = np.array([host, host + 2])
        for got, want in zip(
            take(open_loader(prefix, packing=packing, rows=rows), 3), whole[:3], strict=True
        ):
            np.testing.assert_array_equal(got["images"], want["images"][rows])
    assert any((whole[0]["images"] != other["images"]).any() for other in whole[1:])


def test_a_blend_and_an_evaluation_have_the_images_too(prefix):
    parts = [BlendPart(dataset=str(prefix), weight=weight) for weight in (0.5, 0.5)]
    (batch,) = take(open_loader(parts), 1)
    assert batch["images"].shape == (ROWS, 2, *SIZE, 3)
    batches = list(
        evaluation_batches(prefix, batch_size=ROWS, seq_len=LENGTH, packing="pad", images=IMAGES)
    )
    images = np.concatenate([batch["images"] for batch in batches])
    for number, (_, pixels) in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(images[number, : len(pixels)], pixels)


def test_a_position_of_another_number_of_images_in_a_row_is_refused(prefix):
    loader = open_loader(prefix)
    state = loader.state()
    loader.close()
    more = RowImages(images=3, height=2, width=4, token=TOKEN, tokens=TOKENS)
    other = open_loader(prefix, images=more)
    with pytest.raises(DataError, match=r"packing was .*images: 2.* and is now .*images: 3"):
        other.restore(state)
    other.close()


def place_one_by_one(sizes, images, length, most):
    """Return the free positions and the room for images of each row, sorted, without an index."""
    rows = []
    for document in np.argsort(-sizes, kind="stable"):
        fitting = [row for row in rows if row[0] >= sizes[document] and row[1] >= images[document]]
        row = min(fitting, default=None)
        if row is None:
            rows.append(row := [length, most])
        row[0] -= sizes[document]
        row[1] -= images[document]
    return sorted(rows)


@given(
    documents=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=60),
    most=st.integers(3, 5),
)
@settings(max_examples=100, deadline=None)
def test_best_fit_keeps_both_limits_and_is_the_plain_one_without_images(documents, most):
    sizes, images = map(np.array, zip(*documents, strict=True))
    row_of = best_fit_with_images(sizes, images, 20, most)
    used = np.bincount(row_of, sizes).astype(int), np.bincount(row_of, images).astype(int)
    rows = [[20 - used[0][row], most - used[1][row]] for row in range(row_of.max() + 1)]
    assert sorted(rows) == place_one_by_one(sizes, images, 20, most)
    without = best_fit_with_images(sizes, np.zeros_like(images), 20, most)
    assert without.max() == best_fit(sizes, 20).max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": None}, r"for images, but program.model.images = 0; set it to at least 2, "
         r"with program.model.image_size = \[2, 4\] \(a document has up to 2 images\)"),
        ({"images": RowImages(images=1, height=2, width=4, token=TOKEN, tokens=TOKENS)},
         r"document \d+ has 2 images, but a row takes program.model.images = 1; \d+ of 40 "
         'documents have more, at most 2; increase it, or set run.data.overlong to "drop"'),
        ({"images": RowImages(images=2, height=4, width=4, token=TOKEN, tokens=TOKENS)},
         r"train has images of 2 x 4 pixels .* the program takes 4 x 4; set "
         r"program.model.image_size = \[2, 4\], or prepare the dataset with --image-size 4 4"),
        ({"images": RowImages(images=2, height=2, width=4, token=7, tokens=TOKENS)},
         "has 4 tokens of id 255 for an image, but the model needs 4 of id 7"),
        ({"overlong": "truncate"}, '"truncate" would cut documents with images'),
        ({"packing": "concat"}, 'packing = "concat" supports only text'),
    ],
)  # fmt: skip
def test_what_a_program_does_not_take_is_refused_with_what_to_set(prefix, options, message):
    with pytest.raises(DataError, match=message):
        open_loader(prefix, **options)


def test_an_overlong_document_with_images_is_named_and_not_cut(tmp_path):
    documents = make_documents([0, 1, 2])
    documents.insert(1, ([1] + [TOKEN] * 4 + [1] * LENGTH, np.zeros((1, *SIZE, 3), np.uint8)))
    prefix = write_image_dataset(tmp_path / "train", documents)
    with pytest.raises(
        DataError,
        match=r"1 of 4 documents are longer than batch.seq_len = 24 \(the longest, document 1, has "
        r'29 tokens\); set run.data.overlong to "drop"',
    ):
        open_loader(prefix)
    with pytest.warns(UserWarning, match="0 are cut, 1 are left out"):
        open_loader(prefix, overlong="drop").close()
    assert packing_report(str(prefix), 2 * LENGTH).startswith("length 48: ")


def test_text_is_refused_by_a_program_that_takes_images(make_dataset):
    with pytest.raises(
        DataError, match=r"has no images, but program.model.images = 2; .* --processor FOLDER"
    ):
        open_loader(make_dataset([[1, 2, 3]], 10))


def test_documents_without_an_image_are_a_dataset_of_images_too(tmp_path):
    prefix = write_image_dataset(tmp_path / "train", make_documents([0] * 9))
    assert verify(prefix)["documents"] == 9
    (batch,) = take(open_loader(prefix), 1)
    assert not batch["images"].any() and batch["weights"].any()
    assert summary(prefix)["images"] == 0
    description = read_description(prefix)
    assert description is not None
    problem = image_problem(description.images, None)
    assert "for images" in str(problem) and "set it to at least 1" in str(problem)


def test_the_images_of_a_chunk_go_to_the_splits_of_their_documents():
    values, sizes = np.arange(9, dtype=np.uint8), np.array([2, 0, 3, 4])
    for mask in np.ndindex(2, 2, 2, 2):
        chosen = np.array(mask, bool)
        if chosen.any():
            expected = values[np.repeat(chosen, sizes)]
            np.testing.assert_array_equal(_of_documents(values, sizes, chosen), expected)


def damage_placeholder(prefix):
    dataset = IndexedDataset(prefix)
    content = np.array(dataset.tokens)
    content[np.argmax(content == TOKEN)] = 1
    content.tofile(f"{prefix}.bin")


def flip(prefix):
    content = bytearray(Path(f"{prefix}_images.bin").read_bytes())
    content[len(content) // 2] ^= 1
    Path(f"{prefix}_images.bin").write_bytes(content)


def truncate(prefix):
    content = Path(f"{prefix}_images.bin").read_bytes()
    Path(f"{prefix}_images.bin").write_bytes(content[:-1])


def remove(prefix):
    Path(f"{prefix}_images.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "_images.bin: its digest differs from the one in train.json"),
        (truncate, r"_images.bin: is \d+ bytes long, but train_images.idx counts"),
        (remove, "_images.bin: no such file"),
        (damage_placeholder, "has [37] placeholders of images, but its [12] images have [48]"),
    ],
)
def test_verification_finds_damage_of_the_images(tmp_path, damage, message):
    prefix = write_image_dataset(tmp_path / "train", DOCUMENTS)
    verify(prefix)
    damage(prefix)
    with pytest.raises(DataError, match=message):
        verify(prefix)


def test_the_checks_of_a_run_find_a_flipped_byte_of_the_images(tmp_path):
    prefix = write_image_dataset(tmp_path / "train", DOCUMENTS)
    assert digest_problem(prefix) is None
    flip(prefix)
    assert "train_images.bin: its digest differs" in (digest_problem(prefix) or "")
    with pytest.raises(DataError, match=r"train_images.bin: the block at byte 0 differs"):
        verify_sample(prefix)
    with pytest.raises(DataError, match=r"train_images.bin: the block at byte 0 differs"):
        DataCheck(Data(train=(BlendPart(dataset=str(prefix), weight=1.0),)))


def test_merged_datasets_keep_the_images_of_each_document(tmp_path):
    parts = DOCUMENTS[:7], DOCUMENTS[7:15]
    prefixes = [
        write_image_dataset(tmp_path / str(index), part) for index, part in enumerate(parts)
    ]
    merged = merge(prefixes, tmp_path / "merged" / "train")
    whole = write_image_dataset(tmp_path / "whole", DOCUMENTS[:15])
    assert merged is not None and merged == read_description(tmp_path / "merged" / "train")
    assert merged.images == read_description(whole).images
    assert verify(tmp_path / "merged" / "train")["documents"] == 15


def test_datasets_of_other_images_are_not_merged(tmp_path):
    prefix = write_image_dataset(tmp_path / "a", DOCUMENTS[:5])
    (tokens, images), *_ = make_documents([1])
    wide = write_image_dataset(tmp_path / "b", [(tokens, images.reshape(1, 4, 2, 3))], size=(4, 2))
    with pytest.raises(
        DataError, match=r"differ in their images: in size.*version of transformers or Pillow"
    ):
        merge([prefix, wide], tmp_path / "merged" / "train")


def test_a_run_does_not_resume_with_other_images(tmp_path):
    others = [(tokens, 255 - images) for tokens, images in DOCUMENTS[:5]]
    prefixes = [
        str(write_image_dataset(tmp_path / name, documents))
        for name, documents in (("a", DOCUMENTS[:5]), ("b", DOCUMENTS[:5]), ("c", others))
    ]
    same, equal, other = map(_dataset_digest, prefixes)
    assert same == equal != other
