"""Weights in several files: each tensor once, and where the index says."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from graphtrain.errors import WeightsError
from graphtrain.weights.weight_folder import open_weight_files

FIRST, SECOND = "model-1.safetensors", "model-2.safetensors"
ARRAY = {"a": np.zeros(2, np.float32)}
OTHER = {"b": np.ones(3, np.float32)}


def write(folder, first, second, index, metadata=None):
    save_file(first, folder / FIRST, metadata)
    save_file(second, folder / SECOND)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_tensors_are_read_from_the_files_of_the_index(tmp_path):
    files = open_weight_files(write(tmp_path, ARRAY, OTHER, {"a": FIRST, "b": SECOND}))
    assert files.names == ("a", "b")
    np.testing.assert_array_equal(files.read("b"), OTHER["b"])


def test_a_tied_tensor_that_a_converter_left_out_of_its_file_is_not_missing(tmp_path):
    """The Hub's converter drops it, records which one it kept, and copies the index."""
    index = {"a": FIRST, "tied": FIRST, "b": SECOND}
    files = open_weight_files(write(tmp_path, ARRAY, OTHER, index, {"format": "pt", "tied": "a"}))
    assert files.names == ("a", "b")
    with pytest.raises(WeightsError, match=r"tied is in .* is missing there"):
        open_weight_files(write(tmp_path, ARRAY, OTHER, index, {"tied": "lost"}))


WRONG = {
    "twice": (
        ARRAY,
        OTHER | ARRAY,
        {"a": FIRST, "b": SECOND},
        "a is in .* and in model-2",
    ),
    "swapped": (ARRAY, OTHER, {"a": SECOND, "b": FIRST}, f"a is in {SECOND}, but it is in {FIRST}"),
    "missing": (ARRAY, OTHER, {"a": FIRST, "c": SECOND}, f"c is in {SECOND}, but it is missing"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_files_that_contradict_the_index_are_refused_by_name(kind, tmp_path):
    first, second, index, message = WRONG[kind]
    with pytest.raises(WeightsError, match=message):
        open_weight_files(write(tmp_path, first, second, index))


def test_one_file_beside_an_index_of_others_is_refused(tmp_path):
    write(tmp_path, ARRAY, OTHER, {"a": FIRST, "b": SECOND})
    save_file(ARRAY, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"both model\.safetensors and model\.saf"):
        open_weight_files(tmp_path)
