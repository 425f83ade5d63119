"""Names of stacked blocks: written, read, and found in a folder and in an older checkpoint."""

import numpy as np
import pytest

from graphtrain.checkpoints.joined_blocks import load_joined, rows_by_path
from graphtrain.errors import TrainingError
from graphtrain.graphs.dumped_arrays import NamedArray
from graphtrain.torch_frontend.block_ranges import blocks_of, range_name
from graphtrain.weights.layer_row_names import rows_of
from lowering.trees import flatten, unflatten


@pytest.mark.parametrize(("blocks", "name"), [(range(3, 61), "3-60"), (range(1, 24, 6), "1-19by6")])
def test_a_name_tells_its_blocks(blocks, name):
    assert range_name(blocks) == name
    assert blocks_of(name) == blocks


@pytest.mark.parametrize("component", ["3", "layers", "60-3", "3-3", "0-8by0", "a-b", "3-60by"])
def test_other_components_name_no_blocks(component):
    assert blocks_of(component) is None


def test_rows_are_found_in_a_folder_among_other_blocks_of_their_list():
    names = {f"model.layers.{number}.up.weight" for number in range(9)}
    found = rows_of("model.layers.1-7by3.up.weight", 3, names)
    assert next(found) == [f"model.layers.{number}.up.weight" for number in (1, 4, 7)]
    assert not list(rows_of("model.layers.1-7by3.up.weight", 2, names))
    assert not list(rows_of("model.layers.7-10.up.weight", 4, names))


@pytest.mark.parametrize(
    ("numbers", "position", "rows"),
    [
        (range(24), 5, [5, 17]),
        (range(6), 2, [2, 5]),
        ({0, 1, 8, 9}, 1, [1, 9]),  # of an adapter, for some of the blocks
        ({4, 12}, 4, [4, 12]),
        ({4, 12}, 3, None),
        (range(7), 0, None),
    ],
)
def test_rows_at_a_position_are_those_of_the_only_period_that_fits(numbers, position, rows):
    names = {f"layers.{number}.up" for number in numbers} | {"layers.0.norm"}
    found = list(rows_of(f"layers.{position}.up", 2, names))
    assert found == ([] if rows is None else [[f"layers.{number}.up" for number in rows]])


def test_an_array_of_a_dump_is_named_by_its_block():
    array = NamedArray("forward", "model/layers/3-60/mlp/up", 2, (), "model/layers/3-60")
    assert array.name == "forward/model/layers/5/mlp/up"


def _described(shape: tuple[int, ...]) -> dict:
    arrays = {"parameters/layers/1-5by2/up": shape, "parameters/layers/0/up": (4,)}
    return unflatten({path: np.empty(of, np.float32) for path, of in arrays.items()})


def test_blocks_of_an_older_checkpoint_are_joined(tmp_path):
    arrays = {
        f"parameters/layers/{number}/up": np.arange(4, dtype=np.float32) + 10 * number
        for number in (0, 1, 3, 5)
    }
    saved = {path: [list(array.shape), str(array.dtype)] for path, array in arrays.items()}
    described = _described((3, 4))
    rows = rows_by_path(saved, described)
    assert rows == {
        "parameters/layers/1-5by2/up": [f"parameters/layers/{number}/up" for number in (1, 3, 5)]
    }

    def load(described, read):
        parts = {
            path: np.stack(
                [read(path, leaf.shape, (slice(1, 3), *[slice(None)] * (leaf.ndim - 1)))]
            )
            for path, leaf in flatten(described).items()
        }
        return unflatten(parts)

    def open_array(path):
        return lambda index: arrays[path][index]

    loaded = flatten(load_joined(tmp_path, saved, described, rows, load, open_array))
    expected = np.stack([arrays[f"parameters/layers/{number}/up"] for number in (3, 5)])
    np.testing.assert_array_equal(loaded["parameters/layers/1-5by2/up"][0], expected)
    np.testing.assert_array_equal(loaded["parameters/layers/0/up"][0], [1, 2])
    with pytest.raises(TrainingError, match=r"1-5by2/up is float32 \[3, 4\] in the checkpoint"):
        load_joined(tmp_path, saved, _described((3, 5)), rows, load, open_array)
    del saved["parameters/layers/3/up"]
    assert not rows_by_path(saved, described)
