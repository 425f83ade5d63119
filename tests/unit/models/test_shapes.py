"""The tests check the shapes in the models' annotations (tests/shapes.py)."""

import ast
from pathlib import Path

import jax.numpy as jnp
import pytest
import shapes
from jaxtyping import TypeCheckError

import graphtrain.models
from graphtrain.models.attention.dot_product import dot_product_attention

MODELS = Path(graphtrain.models.__path__[0])


def test_an_array_of_another_shape_than_annotated_is_an_error():
    query, key = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 4, 32))
    with pytest.raises(TypeCheckError, match=r"(?s)'key'.*Actual value: f32\[2,8,4,32\]"):
        dot_product_attention(query, key, key)


def test_every_name_of_a_shape_can_be_resolved():
    imported = {
        name.name
        for path in MODELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
        for name in node.names
    }
    assert imported and imported <= shapes.NAMES.keys()
