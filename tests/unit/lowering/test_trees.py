import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowering.trees import flatten, unflatten

NAMES = st.text(st.characters(exclude_characters="/", codec="utf-8"), min_size=1)
TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1), max_leaves=12
)


@given(TREES)
def test_unflatten_gives_back_what_flatten_took(tree):
    assert unflatten(flatten(tree)) == tree


@given(st.dictionaries(NAMES, TREES, min_size=1))
def test_leaves_come_in_the_order_in_which_jax_takes_them(tree):
    import jax

    assert list(flatten(tree).values()) == jax.tree.leaves(tree)


def test_an_empty_dictionary_has_no_path():
    with pytest.raises(ValueError, match=r"state/optimizer is an empty dictionary"):
        flatten({"state": {"optimizer": {}}})


def test_a_slash_in_a_name_is_refused():
    with pytest.raises(ValueError, match=r"key 'a/b' contains a slash"):
        flatten({"a/b": 1})
