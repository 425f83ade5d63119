"""Targets of the token after the next."""

import jax.numpy as jnp
import numpy as np

from graphtrain.graphs.objectives import _targets_ahead


def test_the_last_position_of_a_sequence_has_no_token_after_the_next():
    batch = {"targets": jnp.array([[1, 2, 3, 4]]), "weights": jnp.array([[1.0, 1.0, 0.0, 1.0]])}
    targets, weights = _targets_ahead(batch)
    np.testing.assert_array_equal(targets[:, :3], [[2, 3, 4]])
    np.testing.assert_array_equal(weights, [[1, 0, 1, 0]])


def test_no_token_of_another_document_is_predicted():
    batch = {
        "targets": jnp.array([[1, 2, 3, 4]]),
        "weights": jnp.ones((1, 4)),
        "documents": jnp.array([[0, 0, 1, 1]]),
    }
    np.testing.assert_array_equal(_targets_ahead(batch)[1], [[1, 0, 1, 0]])
