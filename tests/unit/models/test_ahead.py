"""Targets of the token after the next."""

import jax.numpy as jnp
import numpy as np

from graphtrain.graphs.targets_ahead import targets_ahead


def batch_of(tokens, targets, **arrays):
    weights = [[1.0] * len(targets)]
    given = {"tokens": [tokens], "targets": [targets], "weights": weights} | arrays
    return {name: jnp.array(array) for name, array in given.items()}


def test_the_last_position_of_a_sequence_has_no_token_after_the_next():
    batch = batch_of([0, 1, 2, 3], [1, 2, 3, 4], weights=[[1.0, 1.0, 0.0, 1.0]])
    targets, weights = targets_ahead(batch)
    np.testing.assert_array_equal(targets[:, :3], [[2, 3, 4]])
    np.testing.assert_array_equal(weights, [[1, 0, 1, 0]])


def test_no_token_of_another_document_is_predicted():
    batch = batch_of([0, 1, 2, 3], [1, 2, 3, 4], documents=[[0, 0, 1, 1]])
    np.testing.assert_array_equal(targets_ahead(batch)[1], [[1, 0, 1, 0]])


def test_nor_one_of_the_next_document_of_a_packed_row():
    """Documents 1 2 3 and 7 8 9 in one row, whose attention crosses them."""
    batch = batch_of([1, 2, 7, 8], [2, 3, 8, 9])
    np.testing.assert_array_equal(targets_ahead(batch)[1], [[1, 0, 1, 0]])
