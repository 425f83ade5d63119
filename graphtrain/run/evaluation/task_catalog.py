"""Tasks of lm-eval by name: which files define them, and which tasks a group has.

lm-eval's own index parses all of its 14,000 files, which takes up to minutes. Here their text is
searched for the names that are asked for, and only the files that have them are parsed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks._index import Entry, Kind, TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from graphtrain.errors import DataError

# Lines that name a task, a group or a tag, or an entry of a list of them.
_NAMING = re.compile(r"""^[ \t]*(?:-|["']?(?:task|group|tag)["']?[ \t]*:)(.*)$""", re.MULTILINE)
_INCLUDING = re.compile(r"""^[ \t]*(?:-|["']?include["']?[ \t]*:)(.*)$""", re.MULTILINE)
_NAME = re.compile(r"[^\s,\"'\[\]{}]+")


@dataclass(frozen=True)
class TaskFile:
    """A task and the file that defines it."""

    name: str
    path: Path
    settings: dict[str, Any]  # of the file and of those that it includes; functions as text

    @property
    def runs_code(self) -> bool:
        """Return whether its metric runs code that a model wrote."""
        return bool(self.settings.get("unsafe_code"))

    @property
    def can_confine_code(self) -> bool:
        """Return whether its functions run code by the metric code_eval, which is replaced."""
        modules = {Path(f"{name.rpartition('.')[0]}.py") for name in _function_names(self.settings)}
        return any(
            "code_eval" in module.read_text(errors="replace")
            for module in modules
            if os.path.isfile(module)  # False too for a prompt that is too long to be a path
        )


class TaskCatalog:
    """Tasks, groups and tags of lm-eval, and of files of the user.

    Args:
        root: Folder of the packaged files; None for those of lm-eval.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(str(lm_eval.tasks.__file__)).parent
        self._entries: dict[str, Entry] = {}
        self._parsed: set[Path] = set()
        self.groups: dict[str, Path] = {}  # those that were asked for, and the groups in them

    def tasks(self, word: str) -> list[TaskFile]:
        """Return the tasks that a word stands for: a task, a group, a tag, or a file.

        Raises:
            DataError: there is no such task, or it cannot be evaluated here.
        """
        if word.endswith((".yaml", ".yml")):
            return self._of_file(Path(word))
        return list(self._of_name(word))

    def _of_file(self, path: Path) -> list[TaskFile]:
        try:
            settings = load_yaml(path, resolve_func=False)
        except OSError as error:
            raise DataError(f"--tasks {path}: {error.strerror}") from None
        except Exception as error:  # of the parser of YAML
            raise DataError(f"--tasks {path}: not a task of lm-eval ({error})") from None
        if isinstance(settings.get("task"), str) and "class" not in settings:
            return [TaskFile(settings["task"], path.resolve(), settings)]
        if "group" in settings and isinstance(settings.get("task"), list):
            self.groups[settings["group"]] = path.resolve()
            return list(self._members(settings["task"], settings["group"]))
        raise DataError(f"--tasks {path}: has neither a task's name nor a group with its tasks")

    def _of_name(self, name: str) -> Iterator[TaskFile]:
        entry = self._entry(name)
        if entry is None:
            close = difflib.get_close_matches(name, self._names, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise DataError(f"--tasks {name}: lm-eval has no task, group or tag of this name{hint}")
        if entry.kind is Kind.TAG:
            for member in sorted(entry.tags):
                yield from self._of_name(member)
        elif entry.kind is Kind.GROUP:
            assert entry.cfg is not None and entry.yaml_path is not None
            self.groups[name] = entry.yaml_path
            yield from self._members(entry.cfg["task"], name)
        elif entry.kind is Kind.PY_TASK:
            raise DataError(
                f"--tasks {name}: is written in Python and reads its data from the network; only "
                "tasks that are defined by settings can be evaluated"
            )
        else:
            assert entry.cfg is not None and entry.yaml_path is not None
            yield TaskFile(name, entry.yaml_path, entry.cfg)

    def _members(self, members: Iterable[Any], group: str) -> Iterator[TaskFile]:
        for member in members:
            if isinstance(member, dict) and isinstance(member.get("task"), list):
                yield from self._members(member["task"], group)
                continue
            name = str(
                member.get("group", member.get("task")) if isinstance(member, dict) else member
            )
            if self._entry(name) is None:
                raise DataError(
                    f"--tasks {group}: defines its task {name} by itself, which graphtrain does "
                    "not support; write the task into a file, and name that"
                )
            yield from self._of_name(name)

    def _entry(self, name: str) -> Entry | None:
        """Return the entry of a name, whose files are parsed on first use."""
        for path in self._files.get(name, ()):
            if path not in self._parsed:
                self._parsed.add(path)
                self._parse(path)
        return self._entries.get(name)

    def _parse(self, path: Path) -> None:
        try:
            settings = load_yaml(path, resolve_func=False)
            TaskIndex.process_cfg(settings, path, self._entries)
        except Exception:  # templates and files that lm-eval skips too
            return

    @property
    def _files(self) -> dict[str, list[Path]]:
        return _files_by_name(self._root)

    @property
    def _names(self) -> list[str]:
        return sorted(self._files)


@lru_cache(maxsize=1)
def _files_by_name(root: Path) -> dict[str, list[Path]]:
    """Return the files that may define each name, in the order of lm-eval: the first counts.

    A file also has the tags of the files that it includes. The packaged files are read once in a
    process.
    """
    texts = {
        os.path.normpath(path): path.read_text(errors="replace")
        for path in sorted(root.rglob("*"), key=Path.as_posix)
        if path.suffix not in (".py", ".pyc", ".md") and path.is_file()
    }
    own = {path: _words(_NAMING, text) for path, text in texts.items()}
    included = {path: _included(path, text, texts) for path, text in texts.items()}
    files: dict[str, list[Path]] = {}
    for path in texts:
        if path.endswith(".yaml"):
            for name in set().union(*(own[one] for one in _closure(path, included))):
                files.setdefault(name, []).append(Path(path))
    return files


def _function_names(settings: Any) -> Iterator[str]:
    """Yield the functions in settings, whose modules lm-eval writes as absolute paths."""
    if isinstance(settings, dict):
        settings = list(settings.values())
    if isinstance(settings, list):
        for one in settings:
            yield from _function_names(one)
    elif isinstance(settings, str) and settings.startswith("/"):
        yield settings


def _words(lines: re.Pattern[str], text: str) -> set[str]:
    return {word for line in lines.findall(text) for word in _NAME.findall(line)}


def _included(path: str, text: str, known: Container[str]) -> list[str]:
    """Return the files that a file includes."""
    folder = os.path.dirname(path)
    paths = (os.path.normpath(f"{folder}/{word}") for word in _words(_INCLUDING, text))
    return [one for one in paths if one in known]


def _closure(path: str, included: Mapping[str, Iterable[str]]) -> set[str]:
    """Return a file, those that it includes, those that they include, and so on."""
    found, waiting = {path}, [path]
    while waiting:
        new = set(included[waiting.pop()]) - found
        found |= new
        waiting += new
    return found
