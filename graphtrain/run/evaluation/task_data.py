"""Data of tasks: local files in the place of the datasets that lm-eval downloads.

The data of a task is in DIR/TASK/SPLIT.jsonl or .parquet, or, for all tasks that read the same
dataset, in DIR/DATASET/CONFIGURATION, for example DIR/mmlu/anatomy/test.jsonl.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from graphtrain.errors import DataError
from graphtrain.files import content_digest
from graphtrain.run.evaluation.own_files import find_files, names_files, read_options
from graphtrain.run.evaluation.row_files import (
    READERS,
    RowFormat,
    check_together,
    listed,
    read_rows,
)
from graphtrain.run.evaluation.task_catalog import TaskFile

_SPLIT_SETTINGS = ("training_split", "validation_split", "test_split", "fewshot_split")
_TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class MissingFile(DataError):
    """Error of a split without a file.

    Attributes:
        reason: Where the file was looked for, and what is there.
    """

    def __init__(self, task: str, reason: str, root: Path) -> None:
        super().__init__(
            f"{task}: {reason}; graphtrain data tasks {root} {task} --script prints what fills it"
        )
        self.reason = reason


@dataclass(frozen=True)
class TaskData:
    """Local files of a task.

    Args:
        task: The task.
        root: Directory of the data of all tasks.
        fewshot: Number of examples in a prompt; None for that of the task.
    """

    task: TaskFile
    root: Path
    fewshot: int | None = None

    @property
    def evaluated(self) -> str:
        """Split whose rows are evaluated."""
        settings = self.task.settings
        return str(settings.get("test_split") or settings.get("validation_split") or "test")

    @property
    def shots(self) -> int:
        """Number of examples in a prompt. A task that has 0 always has 0, as in lm-eval."""
        own = self.task.settings.get("num_fewshot")
        return own or 0 if own == 0 or self.fewshot is None else self.fewshot

    @property
    def place(self) -> str:
        """File or split of the rows that are evaluated, for error messages."""
        return str(self.files.get(self.evaluated, f"the split {self.evaluated}"))

    @property
    def examples(self) -> str | None:
        """Split that examples are taken from; None if the task has examples of its own."""
        settings = self.task.settings
        fewshot = settings.get("fewshot_config") or {}
        split = fewshot.get("split") or settings.get("fewshot_split")
        if split is None and "samples" in fewshot:
            return None
        split = split or settings.get("training_split") or settings.get("validation_split")
        return str(split or self.evaluated)

    @property
    def folders(self) -> list[Path]:
        """Folders that may hold the files, the task's own first."""
        settings = self.task.settings
        dataset = str(settings.get("dataset_path") or self.task.name)
        name = str(settings.get("dataset_name") or "")
        # Datasets of two owners may have the same name.
        shared = (self.root / part / name for part in (dataset, dataset.rpartition("/")[2]))
        return list(dict.fromkeys((self.root / self.task.name, *shared)))

    @cached_property
    def files(self) -> dict[str, Path]:
        """Files that exist, by split; several files of a split are numbered, as test.1."""
        settings = self.task.settings
        wanted = {self.evaluated, self.examples, *(settings.get(key) for key in _SPLIT_SETTINGS)}
        if self.has_files_of_its_own:
            own = find_files(self.task)
            return {
                split if len(own[split]) == 1 else f"{split}.{number}": path
                for split in sorted(wanted & own.keys())
                for number, path in enumerate(own[split], 1)
            }
        found = {split: self._find(str(split)) for split in sorted(filter(None, wanted))}
        return {split: path for split, path in found.items() if path is not None}

    @property
    def fields(self) -> list[str]:
        """Fields that the prompts name; those that functions of the task read are not known."""
        return sorted(set().union(*(named for named, _ in self._named_fields)))

    @property
    def _needed_fields(self) -> set[str]:
        """Fields of all rows: none of prompts that ask whether a row has a field."""
        return {name for named, asks in self._named_fields if not asks for name in named}

    @cached_property
    def _named_fields(self) -> list[tuple[set[str], bool]]:
        """Fields that each template names, and whether it asks which of them a row has."""
        settings = self.task.settings
        if settings.get("process_docs"):
            return []  # the prompts name fields that this function makes
        found: list[tuple[set[str], bool]] = []
        for name in _TEMPLATES:
            template = settings.get(name)
            for text in template if isinstance(template, list) else [template]:
                # A text that begins with / is a function, by its path.
                if isinstance(text, str) and not text.startswith("/"):
                    found.append(fields_of(text))
            if isinstance(template, str) and _IDENTIFIER.fullmatch(template):
                found.append(({template}, False))
        return found

    @property
    def has_files_of_its_own(self) -> bool:
        """Return whether the task's settings name local files."""
        return names_files(self.task)

    @property
    def _form(self) -> RowFormat:
        """Format that the files are read in."""
        if self.has_files_of_its_own:
            return RowFormat(self.task.settings["dataset_path"], read_options(self.task))
        readers = {READERS[path.suffix] for path in self.files.values()}
        if len(readers) > 1:
            raise DataError(
                f"{self.task.name}: {', '.join(map(str, self.files.values()))} have different "
                "formats; use one for all splits"
            )
        return RowFormat(readers.pop())

    def check_files(self, shots: int | None = None) -> None:
        """Check that there are files for the rows and the examples.

        Args:
            shots: Number of examples where a group sets it; None for that of the task.

        Raises:
            MissingFile: one is missing; the message says where it was looked for.
        """
        needed = [self.evaluated]
        if (self.shots if shots is None else shots) and self.examples is not None:
            needed.append(self.examples)
        for split in needed:
            if split not in self.files:
                raise MissingFile(self.task.name, self._missing(split), self.root)

    def settings(self, cache: Path) -> dict[str, Any]:
        """Return the settings of lm-eval that replace the dataset of the task.

        Args:
            cache: Directory of the files that the package `datasets` writes.
        """
        replaced: dict[str, Any] = {
            "include": str(self.task.path),
            "task": self.task.name,
            "dataset_path": self._form.reader,
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {split: str(path) for split, path in self.files.items()},
                "cache_dir": str(cache),
            },
        }
        if self.examples is not None and self.examples not in self.files:
            # lm-eval reads the examples even where a prompt has none.
            settings = self.task.settings
            splits = ("training_split", "validation_split")
            absent = [name for name in splits if settings.get(name) not in self.files]
            replaced |= dict.fromkeys(("fewshot_split", "fewshot_config", *absent))
        return replaced

    def rows(self, cache: Path) -> dict[str, int]:
        """Return the number of rows of each file, whose fields are checked.

        Raises:
            DataError: a file cannot be read, has no rows, or lacks a field.
        """
        rows = {split: self._rows(path, cache) for split, path in self.files.items()}
        if len(rows) > 1:
            files = {split: str(path) for split, path in self.files.items()}
            check_together(files, self.fields, cache, self._form)
        return rows

    def digests(self) -> dict[str, dict[str, str]]:
        """Return the path and SHA-256 digest of each file, by split."""
        return {
            split: {"file": str(path), "sha256": content_digest(path)}
            for split, path in self.files.items()
        }

    def _rows(self, path: Path, cache: Path) -> int:
        table = read_rows(path, cache, self._form)
        for field in self.fields:
            if field not in table.column_names:
                if field not in self._needed_fields:
                    continue
                raise DataError(
                    f"{path}: has no field {field!r}, which the task {self.task.name} reads; it "
                    f"has {listed(table.column_names)}"
                )
            if empty := table.data.column(field).null_count:
                row = table[field][:].index(None) + 1
                raise DataError(
                    f"{path}: row {row} has no field {field!r}, which the task {self.task.name} "
                    f"reads; {empty} of {len(table)} rows lack it"
                )
        return len(table)

    def _find(self, split: str) -> Path | None:
        names = [f"{split}{suffix}" for suffix in READERS]
        candidates = [folder / name for folder in self.folders for name in names]
        found = {path.resolve(): path for path in reversed(candidates) if path.is_file()}
        if len(found) > 1:
            both = " and ".join(str(path) for path in reversed(found.values()))
            raise DataError(f"{self.task.name}: {both} are the same split; remove one")
        return next(iter(found.values()), None)

    def _missing(self, split: str) -> str:
        """Return where the file of a split was looked for, and what is there."""
        named = dict.fromkeys((self.folders[0], self.folders[-1]))
        places = " or ".join(f"{folder}/{split}.jsonl" for folder in named)
        there = [
            path.name if path.is_file() else f"{path.name}, which is no file"
            for folder in self.folders
            for path in sorted(folder.glob("*.*"))
        ]
        found = f"; there is {listed(there)}" if there else ""
        return f"no {places} (or .parquet){found}"


def fields_of(template: str) -> tuple[set[str], bool]:
    """Return the fields that a template of Jinja names, and whether it asks if a row has one."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes

    try:
        parsed = Environment().parse(template)
    except TemplateSyntaxError:
        return set(), False
    tests = {one.name for one in parsed.find_all(nodes.Test)}
    filters = {one.name for one in parsed.find_all(nodes.Filter)}
    asks = bool(tests & {"defined", "undefined"} or filters & {"default", "d"})
    return meta.find_undeclared_variables(parsed), asks
