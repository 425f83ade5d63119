"""Blocks of several kinds in one list: which of them run in scans, and under which names."""

from pathlib import Path

import numpy as np
import pytest

from graphtrain.config.schema import TorchModel
from graphtrain.errors import ImportedModelError
from graphtrain.graphs.open_model import open_language_model
from graphtrain.torch_frontend.blocks import Stack, divide
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import check_parity, stack_weights, unstack_weights
from graphtrain.weights.layer_row_names import rows_of

MODULES = Path(__file__).with_name("modules.py")


def model(remat: str = "none", **overrides) -> TorchModel:
    settings = {"vocab": 16, "dtype": "float32", "remat": remat, "overrides": overrides}
    return TorchModel(torch=f"{MODULES}:Blocks", **settings)


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("aaabbbbb", [(0, 3, 1), (3, 5, 1)]),  # dense, then mixtures
        ("abbbbb", [(0, 1, 0), (1, 5, 1)]),
        ("lllllg" * 4 + "ll", [(0, 24, 6), (24, 2, 1)]),  # as Gemma 3 with 26 layers
        ("lllllg" * 2 + "ll", [(0, 12, 6), (12, 2, 1)]),
        ("abababa", [(0, 6, 2), (6, 1, 0)]),
        ("cababab", [(0, 1, 0), (1, 6, 2)]),
        ("aa-aa-", [(0, 2, 1), (2, 1, 0), (3, 2, 1), (5, 1, 0)]),
        ("abc", [(0, 3, 0)]),
    ],
)
def test_few_blocks_are_traced_in_few_runs(kinds, runs):
    assert divide([None if kind == "-" else ord(kind) for kind in kinds]) == runs


def test_a_long_list_without_repetitions_is_divided_soon():
    assert divide(range(200)) == [(0, 200, 0)]


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        ({"kinds": "caaaa"}, {"blocks/0/up/weight": 1, "blocks/1-4/up/weight": 4}),
        (
            {"kinds": "aabaabaa"},
            {
                "blocks/0-3by3/up/weight": 2,
                "blocks/1-4by3/up/weight": 2,
                "blocks/2-5by3/up/weight": 2,
                "blocks/6-7/up/weight": 2,
            },
        ),
        ({"kinds": "abababab"}, {"blocks/0/up/weight": 4, "blocks/1/up/weight": 4}),
        (
            {"use": "tied", "count": 7},
            {"blocks/0/up/weight": 1, "blocks/4-6/up/weight": 3, "blocks/1/up/weight": 1},
        ),
    ],
)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_names_tell_blocks_and_gradients_are_pytorchs(overrides, paths, remat):
    settings = model(remat, **overrides)
    opened = open_model(settings)
    names = opened.parameter_names_by_path()
    assert {path: len(names[path]) for path in paths} == paths
    available = {name for inside in names.values() for name in inside}
    for path, inside in names.items():  # as a folder's tensors are found
        if opened.is_stacked(path):
            assert next(rows_of(path.replace("/", "."), len(inside), available)) == inside
        else:
            assert inside == [path.replace("/", ".")]
    found = check_parity(settings, (2, 6))
    assert found.loss <= 1e-5 and found.gradient <= 1e-4 and not found.strict


def test_weights_are_stacked_and_unstacked_by_their_blocks():
    opened = open_model(model(kinds="aabaabaa"))
    weights = {
        name: np.full(tuple(one.shape), number, np.float32)
        for number, (name, one) in enumerate(opened.meta.parameters().items())
    }
    back = unstack_weights(opened, stack_weights(opened, weights))
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name], weights[name]) for name in weights)


def test_a_run_whose_blocks_compute_by_their_number_is_traced_one_by_one():
    opened = open_model(model(use="numbered", kinds="caaaa"))
    assert not any(isinstance(blocks, Stack) for blocks in opened.block_lists)
    assert opened.block_lists[1].reason == "block 2 computes something else than block 1"
    assert check_parity(opened.settings, (2, 6)).gradient <= 1e-4


def test_blocks_that_run_twice_for_a_token_cannot_generate():
    with pytest.raises(ImportedModelError, match=r"blocks\.0 is called several times"):
        open_language_model(model(use="twice")).cached_layers()
