"""Datasets of the Hugging Face hub as JSON lines, which `graphtrain data prepare` reads.

The package `datasets` fetches them. Since its version 4 it runs no code of a dataset.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.errors import DataError
from graphtrain.files import write_new
from lowering.machine.extras import optional_import

_REPORT_EVERY = 1000  # rows


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset of the hub.

    Args:
        name: Name on the hub, "OWNER/NAME", or the path of a folder with data files.
        configuration: Name of its configuration. None: the only one, or the default.
        split: Split, also a part of one, as "train[:1%]".
        revision: Commit, branch or tag. None: the newest.
        streaming: Read the files over the network, row by row, without a copy in the cache of
            `datasets`; a part of a split cannot be named then.
    """

    name: str
    configuration: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows in order.

        Raises:
            MissingExtra: `datasets` is not installed.
            DataError: there is no such dataset, configuration or split, or it cannot be read.
        """
        with optional_import("graphtrain data hub"):
            import datasets
        choice: Any = {"split": self.split, "revision": self.revision}
        try:
            rows: Any = datasets.load_dataset(
                self.name, self.configuration, streaming=self.streaming, **choice
            )
            yield from rows
        except Exception as error:  # of many packages: of the network, of files, of arguments
            raise DataError(f"{self}: {_reason(error)}") from error

    def __str__(self) -> str:
        parts = [self.name, self.configuration, self.split, self.revision]
        return " ".join(filter(None, parts))


def write_rows(
    dataset: HubDataset,
    output: Path,
    *,
    columns: Sequence[str] = (),
    limit: int | None = None,
    report: Callable[[str, float], None] = lambda stage, fraction: None,
) -> int:
    """Write a dataset as JSON lines; return the number of rows.

    The file appears when it is complete.

    Args:
        dataset: The dataset.
        output: File to write.
        columns: Columns to write. Empty: all.
        limit: Number of rows to write. None: all.
        report: Called with a description and the fraction that is done, where that is known.

    Raises:
        DataError: the dataset cannot be read, has no such column or no rows, or a value is no JSON.
        OutputExists: the file exists with other content.
        OSError: the file cannot be written.
    """
    count = 0
    with write_new(output) as file:
        for row in itertools.islice(dataset.rows(), limit):
            file.write(_line(dataset, row, columns, count))
            count += 1
            if count % _REPORT_EVERY == 0:
                report(f"{count} rows", count / limit if limit else 0.0)
        if not count:
            raise DataError(f"{dataset}: has no rows")
    return count


def _line(
    dataset: HubDataset, row: Mapping[str, Any], columns: Sequence[str], number: int
) -> bytes:
    if missing := [name for name in columns if name not in row]:
        raise DataError(f"{dataset}: no column {missing[0]!r}, only {', '.join(row)}")
    chosen = {name: row[name] for name in columns or row}
    for name, value in chosen.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise DataError(
                f"{dataset}: row {number}: column {name!r} is {type(value).__name__}, which JSON "
                "does not have; choose the columns of the text with --column"
            ) from None
    return (json.dumps(chosen, ensure_ascii=False) + "\n").encode()


def _reason(error: Exception) -> str:
    """Return an error in one line, with its cause, which alone says what is wrong at times."""
    lines = [f"{type(one).__name__}: {one}" for one in (error, error.__cause__) if one is not None]
    return "; ".join(" ".join(line.split())[:300] for line in lines)
