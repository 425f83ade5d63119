"""Reading of tables: parquet files, and Arrow files in folders saved by `datasets`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graphtrain.data.readers.records import FilePosition, LocatedRecord, RecordGroup, group_records
from graphtrain.errors import DataError
from lowering.machine.extras import optional_import
from sharding_rules.documents import read_json

TABLE_SUFFIXES = (".parquet", ".arrow")
_ROWS = 256  # rows read at a time

TableBatches = Iterator[
    tuple[int, Any, float]
]  # index of first row, rows, fraction of the file read


def read_rows(path: Path, keys: Sequence[str], start: FilePosition) -> Iterator[RecordGroup]:
    """Yield rows of a table from a place on, as dictionaries of the columns `keys`, or of all.

    Raises:
        DataError: the content does not match the suffix of the file, or a column is missing.
    """
    pyarrow = _pyarrow(path)
    row = start.offset
    try:
        for group in group_records(_items(path, keys, start.offset)):
            row = group.next_position.offset
            yield group
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        kind = "Arrow" if path.suffix == ".arrow" else "parquet"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path}: after row {row}: not a {kind} file, or a damaged one ({reason})"
        ) from None


def arrow_files(folder: Path) -> list[Path]:
    """Return the files of a folder written by `datasets.Dataset.save_to_disk`, in order.

    Raises:
        DataError: the folder contains several splits, or is another kind of folder.
    """
    state, splits = folder / "state.json", folder / "dataset_dict.json"
    try:
        if splits.is_file():
            names = read_json(splits)["splits"]
            raise DataError(
                f"{folder}: contains the splits {', '.join(names)}; name one of them, for example "
                f"{folder / names[0]}"
            )
        files = read_json(state)["_data_files"]
        return [folder / file["filename"] for file in files]
    except FileNotFoundError:
        raise DataError(
            f"{folder}: is a folder without state.json, so it was not saved by datasets; name the "
            "files in it instead"
        ) from None
    except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
        raise DataError(
            f"{state}: not the state.json of a folder saved by datasets ({error})"
        ) from None


def _pyarrow(path: Path) -> Any:
    with optional_import(f"{path}: a table"):
        import pyarrow
    return pyarrow


def _items(path: Path, keys: Sequence[str], start: int) -> Iterator[LocatedRecord]:
    size = path.stat().st_size
    batches = (
        _arrow_batches(path) if path.suffix == ".arrow" else _parquet_batches(path, keys, start)
    )
    for first_row, batch, fraction in batches:
        if first_row + batch.num_rows <= start:
            continue
        _check_columns(path, batch.schema.names, keys)
        for offset in range(max(start - first_row, 0), batch.num_rows, _ROWS):
            columns = list(keys) or batch.schema.names
            rows = batch.slice(offset, _ROWS).select(columns).to_pylist()
            for row_number, record in enumerate(rows, first_row + offset + 1):
                yield LocatedRecord(
                    row_number,
                    record,
                    FilePosition(row_number, row_number + 1),
                    int(size * fraction),
                )


def _parquet_batches(path: Path, keys: Sequence[str], start: int) -> TableBatches:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        _check_columns(path, file.schema_arrow.names, keys)
        rows = max(file.metadata.num_rows, 1)
        columns = list(keys) or None
        first_row = 0
        for group in range(file.num_row_groups):
            next_row = first_row + file.metadata.row_group(group).num_rows
            if next_row > start:
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                    yield first_row, batch, min(first_row / rows, 1.0)
                    first_row += batch.num_rows
            first_row = next_row


def _arrow_batches(path: Path) -> TableBatches:
    """Yield batches of an Arrow stream, as `datasets` writes, or of an Arrow file."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        first_row, size = 0, max(source.size(), 1)
        if source.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source))
        for batch in batches:
            batch.validate(full=True)  # lengths and offsets in a damaged file may be invalid
            yield first_row, batch, source.tell() / size
            first_row += batch.num_rows


def _check_columns(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            columns = ", ".join(map(repr, names[:5])) or "nothing"
            raise DataError(
                f"{path}: no column {key!r}, only {columns}; choose a column with --key"
            )
