"""Code of the user that a setting names: "file.py:name", "module:name", or an entry point.

It runs when a graph is traced, with the rights of the command, as any script of the user would.
Only the user's own configuration names it: neither a dataset, a checkpoint nor a cache does.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from graphtrain.errors import ConfigError
from graphtrain.files import content_digest

_DIGITS = 16  # of a digest
_REFERENCE = re.compile(r"(.+\.py|\w+(\.\w+)*):[A-Za-z_]\w*")


def is_user_code(reference: str) -> bool:
    """Return whether a dataset is "file.py:name" or "module:name", and not a path."""
    return _REFERENCE.fullmatch(reference) is not None


@dataclass(frozen=True)
class UserCode:
    """Object of the user's code, by its reference in a setting."""

    setting: str  # for messages: "program.optimizer.custom"
    group: str  # of entry points: "graphtrain.optimizers"
    reference: str

    def key_ingredients(self) -> dict[str, Any]:
        """Return the name of the object, and a digest of each source that it is made of.

        Raises:
            ConfigError: the source does not exist.
        """
        module, name = self._split()
        if not module:
            from lowering.machine.backends import package_digest

            entry = self._entry_point()
            return {"name": entry.value, "sources": {entry.module: package_digest(entry)}}
        return {"name": name, "sources": dict(sorted(local_sources(self._file(module))))}

    def source(self) -> Path | None:
        """Return the file that defines the object, without an import; None if unknown.

        Raises:
            ConfigError: the source does not exist.
        """
        module, _ = self._split()
        if not module:
            self._entry_point()
            return None
        package, *rest = [module] if module.endswith(".py") else module.split(".")
        if not rest:
            return self._file(module)
        return find_submodule(package, rest) or self._file(module)

    def load(self) -> Any:
        """Return the object, imported from the sources as they are now.

        Raises:
            ConfigError: it does not exist, or its import fails.
        """
        module_name, name = self._split()
        try:
            if not module_name:
                return self._entry_point().load()
            module = import_file(self._file(module_name))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self}: the import failed: {type(error).__name__}: {error}"
            ) from error
        if not hasattr(module, name):
            raise ConfigError(f"{self}: {module_name} has no {name}")
        return getattr(module, name)

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Call the object.

        Raises:
            ConfigError: it raised an exception; the text says where.
        """
        function = self.load()
        try:
            return function(*arguments, **named)
        except Exception as error:
            raise self.error(error) from error

    def error(self, error: Exception) -> ConfigError:
        """Return the error that reports an exception of the user's code, with its line."""
        return ConfigError(f"{self} raised {type(error).__name__}: {error}{_line(error)}")

    def __str__(self) -> str:
        return f'{self.setting} = "{self.reference}"'

    def _split(self) -> tuple[str, str]:
        """Return the module or file, and the name; the module of an entry point is empty."""
        module, colon, name = self.reference.rpartition(":")
        if not name or (colon and not (module and name.isidentifier())):
            raise ConfigError(f'{self}: expected "file.py:name", "module:name" or an entry point')
        return module, name

    def _file(self, module: str) -> Path:
        file = find_file(module)
        if file is None:
            raise ConfigError(
                f"{self}: {module} not found; give the path of a .py file, or a module in the "
                "current directory or on sys.path"
            )
        return file

    def _entry_point(self) -> Any:
        from lowering.machine.backends import find_entry_point

        entry = find_entry_point(self.group, self.reference)
        if entry is None:
            raise ConfigError(
                f"{self}: no installed package has an entry point of this name in the group "
                f'{self.group}; for a file, write "file.py:name"'
            )
        return entry


def find_file(module: str) -> Path | None:
    """Return the file of a module or path; the working directory is searched first."""
    if module.endswith(".py"):
        path = Path(module).resolve()
        return path if path.is_file() else None
    add_to_path(Path.cwd())
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    path = Path(spec.origin) if spec and spec.origin else None
    return path if path is not None and path.is_file() else None


def find_submodule(package: str, names: Sequence[str]) -> Path | None:
    """Return the file of a module in a package, without the import that find_spec makes of it."""
    add_to_path(Path.cwd())
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    for root in (spec and spec.submodule_search_locations) or ():
        if (path := Path(root, *names).with_suffix(".py")).is_file():
            return path
        if (path := Path(root, *names, "__init__.py")).is_file():
            return path
    return None


def add_to_path(directory: Path) -> None:
    """Let modules of a directory be imported, as for a script that is in it."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


_imported: dict[Path, tuple[dict[str, str], ModuleType]] = {}


def import_file(path: Path) -> ModuleType:
    """Import a file; again if it, or a local file that it imports, has changed since."""
    sources = {str(file): content_digest(file) for file in _local_files(path)}
    if path in _imported:
        if _imported[path][0] == sources:
            return _imported[path][1]
        for name, module in list(sys.modules.items()):  # its local files, which may have changed
            if getattr(module, "__file__", None) in sources:
                del sys.modules[name]
    add_to_path(path.parent)
    name = f"graphtrain_user_{path.stem}"  # so that optax.py does not hide a library
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    _imported[path] = sources, module
    return module


def local_sources(path: Path) -> Iterator[tuple[str, str]]:
    """Yield names and digests of a file and of the local files that it imports.

    Names may repeat (__init__.py). Installed packages are not included.
    """
    for file in _local_files(path):
        yield file.name, content_digest(file)[:_DIGITS]


def _local_files(path: Path) -> Iterator[Path]:
    """Yield a file and the local files that it imports, and those that they import."""
    pending, visited = [path], set()
    while pending:
        path = pending.pop()
        if path in visited:
            continue
        visited.add(path)
        yield path
        pending += _imported_by(path)


def _imported_by(path: Path) -> Iterator[Path]:
    """Yield the local files that a file imports, absolutely or relatively."""
    import ast

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


def _line(error: Exception) -> str:
    """Return the last line of the user's files in a traceback."""
    import traceback

    files = {str(path) for path in _imported}
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
