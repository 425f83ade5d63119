"""Weights that a server keeps for the next start."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from graphtrain.checkpoints.manifest import verify_files
from graphtrain.run.serving.kept_weights import KeptWeights
from lowering.machine.target import Target


def test_of_two_servers_that_start_one_keeps_the_weights(tmp_path):
    program: Any = SimpleNamespace(target=Target.parse("cpu:1"))
    weights = {"a": jnp.ones(3), "b": {"c": jnp.zeros((2, 2))}}
    first, second, other = (KeptWeights(tmp_path, key) for key in ("key", "key", "other"))
    assert list(other.write(program, weights)) == ["a", "b/c"]
    written = first.write(program, weights)
    assert next(written) == "a"
    assert list(second.write(program, weights)) == list(other.write(program, weights)) == []
    assert list(written) == ["b/c"]
    verify_files(first.folder)
    assert not other.folder.exists()
    assert list(second.write(program, weights)) == []  # they are kept
    abandoned = other.write(program, weights)
    next(abandoned)
    abandoned.close()  # its server ends
    assert list(other.write(program, weights)) == ["a", "b/c"]
    assert sorted(path.name for path in other.folder.parent.iterdir()) == [".lease", "other"]
