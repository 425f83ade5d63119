"""Configuration and sources of an imported model, and the ingredients of its cache key.

Imports no PyTorch.
"""

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
    from graphtrain.config.schema import TorchModel

# Files that tracing executes. Estimates, conversions and the parity check change no program.
_SOURCES = (
    *("attention.py", "axes.py", "blocks.py", "bridge.py", "decode.py", "experts.py"),
    *("functions.py", "hf_attention.py", "joint.py", "language_model.py", "load_balancing.py"),
    *("meta_module.py", "model.py", "names.toml", "pipeline_parts.py", "private_torch.py"),
    *("scan_blocks.py", "silent_failures.py", "source.py", "strict.py", "transformers_model.py"),
)


def key_ingredients(model: TorchModel) -> dict[str, Any]:
    """Return all that can change the traced model, for its cache key.

    Files are represented by their contents, not by their names.

    Raises:
        ImportedModelError: the configuration or the module cannot be found.
    """
    settings = asdict(model)
    if model.hf is not None:
        settings["hf"] = read_config(model.hf, {})
    else:
        assert model.torch is not None
        name, function = split_name(model.torch)
        settings["torch"] = {"factory": function, "sources": sorted(_sources_of(name))}
    package_sources = {name: _digest(Path(__file__).with_name(name)) for name in _SOURCES}
    return settings | {"versions": installed(), "sources": package_sources}


def split_name(name: str) -> tuple[str, str]:
    """Split "module:factory" into a module, or the path of a .py file, and a function name.

    Raises:
        ImportedModelError: the name is not of that form.
    """
    module, colon, function = name.rpartition(":")
    if not colon or not module or not function.isidentifier():
        raise ImportedModelError(
            f'program.model.torch = "{name}" is not of the form "module:factory"'
        )
    return module, function


def find_module_file(name: str) -> Path:
    """Return the file of a module; the working directory is searched first.

    Raises:
        ImportedModelError: the module does not exist.
    """
    if name.endswith(".py"):
        path = Path(name).resolve()
    else:
        add_working_directory()
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        path = Path(spec.origin) if spec and spec.origin else Path(name)
    if not path.is_file():
        raise ImportedModelError(
            f'program.model.torch = "{name}:...": module not found in the working directory or on '
            "sys.path; set it to an importable module, or to a path that ends in .py"
        )
    return path


def add_working_directory() -> None:
    """Add the working directory to sys.path, as for a script that runs there."""
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.insert(0, working_directory)


def _sources_of(name: str) -> Iterator[tuple[str, str]]:
    """Yield names and digests of a module's file and of local files that it imports.

    Names may repeat (__init__.py). Installed packages are not included.
    """
    pending, visited = [find_module_file(name)], set()
    while pending:
        path = pending.pop()
        if path in visited:
            continue
        visited.add(path)
        yield path.name, _digest(path)
        pending += _imported_by(path)


def _imported_by(path: Path) -> Iterator[Path]:
    """Yield the local files that a file imports, absolutely or relatively."""
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
            yield from _local_module_files(path, level, name)


def _local_module_files(path: Path, level: int, name: str) -> Iterator[Path]:
    """Yield the files of a module, relative to `path` or to the working directory."""
    parts = name.split(".") if name else []
    roots = [path.parents[level - 1]] if level else [path.parent, Path.cwd()]
    for root in roots:
        for file in (
            root.joinpath(*parts).with_suffix(".py"),
            root.joinpath(*parts, "__init__.py"),
        ):
            if parts and file.is_file():
                yield file.resolve()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
