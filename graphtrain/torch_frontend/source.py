"""Where an imported model comes from, and all that decides what it is; imports no PyTorch."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.config.hf_config import read_config
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.versions import installed

if TYPE_CHECKING:
    from graphtrain.config.schema import Imported

# What tracing executes; estimates, conversions and comparisons are not in a program.
_SOURCES = (
    *("attention.py", "axes.py", "balance.py", "blocks.py", "bridge.py", "causes.py"),
    *("continuing.py", "experts.py", "functions.py", "interface.py", "joint.py", "making.py"),
    *("model.py", "names.toml", "scanning.py", "sizes.py", "source.py", "staged.py", "strict.py"),
    "transformers_model.py",
)


def ingredients(model: Imported) -> dict[str, Any]:
    """All that can change what is traced: contents instead of names, and versions.

    Raises:
        ImportedModelError: the configuration or the module is not there.
    """
    settings = asdict(model)
    if model.hf is not None:
        settings["hf"] = read_config(model.hf, {})
    else:
        assert model.torch is not None
        name, function = split_name(model.torch)
        settings["torch"] = {"factory": function, "sources": sorted(_sources_of(name))}
    own = {name: _digest(Path(__file__).with_name(name)) for name in _SOURCES}
    return settings | {"versions": installed(), "sources": own}


def split_name(name: str) -> tuple[str, str]:
    """A module, or the path of a .py file, and the function in it that makes the model.

    Raises:
        ImportedModelError: it is not of the form module:factory.
    """
    module, colon, function = name.rpartition(":")
    if not colon or not module or not function.isidentifier():
        raise ImportedModelError(f'torch = "{name}" is not of the form "module:factory"')
    return module, function


def find(name: str) -> Path:
    """The file of a module, looked for in the working directory first.

    Raises:
        ImportedModelError: there is no such module.
    """
    if name.endswith(".py"):
        path = Path(name).resolve()
    else:
        with_here()
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        path = Path(spec.origin) if spec and spec.origin else Path(name)
    if not path.is_file():
        raise ImportedModelError(
            f'torch = "{name}:...": there is no such module; it is looked for in the working '
            "directory and where Python looks; a path that ends in .py will do too"
        )
    return path


def with_here() -> None:
    """Let Python find modules in the working directory, as when it runs a script there."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _sources_of(name: str) -> Iterator[tuple[str, str]]:
    """Digests of a module's file and of what it imports that is not installed.

    Of one name there may be several, as of __init__.py.
    """
    waiting, seen = [find(name)], set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path.name, _digest(path)
        waiting += _imported_by(path)


def _imported_by(path: Path) -> Iterator[Path]:
    """Files that a file imports from beside it, by name or from a package around it."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [(node.level, base)]
            names += [(node.level, f"{base}.{alias.name}".strip(".")) for alias in node.names]
        else:
            continue
        for level, name in names:
            yield from _beside(path, level, name)


def _beside(path: Path, level: int, name: str) -> Iterator[Path]:
    """The file of a module, relative to a file or to the working directory."""
    parts = name.split(".") if name else []
    roots = [path.parents[level - 1]] if level else [path.parent, Path.cwd()]
    for root in roots:
        for found in (
            root.joinpath(*parts).with_suffix(".py"),
            root.joinpath(*parts, "__init__.py"),
        ):
            if parts and found.is_file():
                yield found.resolve()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
