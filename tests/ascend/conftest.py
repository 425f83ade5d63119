"""MindSpore in this process, for graphs of one rank."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from mindir_graphs import translated

from lowering.ascend.emitter import NUMPY


@pytest.fixture(scope="session")
def mindspore():
    found = pytest.importorskip("mindspore", reason="needs pip install 'graphtrain[ascend]'")
    found.set_context(mode=found.GRAPH_MODE)
    found.set_device("CPU")
    return found


@pytest.fixture
def both(mindspore) -> Callable:
    """What a function of JAX gives here and in MindSpore, as pairs of arrays."""

    def compute(function, *arguments):
        graph = translated(function, *arguments)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "test.mindir")
            path.write_bytes(graph.mindir)
            net = mindspore.nn.GraphCell(mindspore.load(str(path)))
        leaves = jax.tree.leaves(arguments)
        given = [
            mindspore.Tensor(np.asarray(leaf).astype(NUMPY[one.dtype]))
            for leaf, one in zip(leaves, graph.inputs, strict=True)
        ]
        theirs = [np.asarray(one) for one in jax.tree.leaves(jax.jit(function)(*arguments))]
        ours = [one.asnumpy() for one in net(*given)]
        return [
            (mine.reshape(other.shape), _kept(other))
            for mine, other in zip(ours, theirs, strict=True)
        ]

    return compute


def _kept(array: np.ndarray) -> np.ndarray:
    """As graphs keep it: unsigned integers in a wider type or by their bits, bfloat16 in floats."""
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return array.astype(np.int64) if array.dtype.name in ("uint32", "uint64") else array
