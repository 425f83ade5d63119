"""Conversion between nested dictionaries and flat paths: trees are stored by name, not pickled."""

from collections.abc import Iterator, Mapping
from typing import Any

Tree = Any  # a leaf, or a dictionary from names to Trees


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Return the leaves by path, as in "state/parameters/head", in JAX's sorted key order.

    Raises:
        ValueError: a dictionary is empty or a key contains a slash; neither has a path.
    """
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    if not tree:
        raise ValueError(f"{prefix or 'the tree'} is an empty dictionary, which has no path")
    leaves: dict[str, Any] = {}
    for key in sorted(tree):
        if "/" in key:
            raise ValueError(f"{prefix}: key {key!r} contains a slash, the separator of paths")
        leaves |= flatten(tree[key], f"{prefix}/{key}" if prefix else key)
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> Tree:
    """Return the nested dictionaries for leaves by path; the inverse of flatten."""
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


def path_suffixes(path: str) -> Iterator[str]:
    """Yield the part of a path after each slash, longest first.

    For the path of an optimizer moment, one of them is the path of its parameter.
    """
    while "/" in path:
        path = path.partition("/")[2]
        yield path
