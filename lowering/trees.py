"""Nested dictionaries as flat paths and back: trees are stored by name and never pickled."""

from collections.abc import Iterator, Mapping
from typing import Any

Tree = Any  # a leaf, or a dictionary from names to Trees


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Leaves by path, as in "state/parameters/head"; keys in sorted order, as JAX takes them.

    Raises:
        ValueError: an empty dictionary or a key with a slash, which no path can say.
    """
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    if not tree:
        raise ValueError(f"{prefix or 'the tree'} is an empty dictionary, which has no path")
    leaves: dict[str, Any] = {}
    for key in sorted(tree):
        if "/" in key:
            raise ValueError(f"{prefix}: key {key!r} holds a slash")
        leaves |= flatten(tree[key], f"{prefix}/{key}" if prefix else key)
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> Tree:
    """The tree whose flatten is leaves."""
    if list(leaves) == [""]:
        return leaves[""]
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def tails(path: str) -> Iterator[str]:
    """What follows each slash, longest first: of a moment's path one is that of its parameter."""
    while "/" in path:
        path = path.partition("/")[2]
        yield path
