"""Graphs that generate, in MindSpore: sliding windows, soft caps and ALiBi with a KV cache."""

import pytest
from generation_cases import NATIVE
from generation_parity import check_parity

pytest.importorskip("mindspore", reason="needs pip install 'graphtrain[ascend]'")

# MindSpore's tanh and exp differ from PyTorch's in more digits than XLA's.
TOLERANCE = 3e-5


@pytest.mark.parametrize("name", ["gemma 2", "bloom"], ids=["windows, soft caps", "ALiBi"])
def test_generation_is_that_of_pytorch(name, tmp_path):
    check_parity(NATIVE[name], tmp_path, is_native=True, target="ascend-cpu:1", tolerance=TOLERANCE)
