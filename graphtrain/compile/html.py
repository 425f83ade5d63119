"""HTML of results, which notebooks show."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; the values are escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_facts(title: str, facts: Mapping[str, Any]) -> str:
    """Return a title and a table of names and values; those that are None are left out."""
    rows = [(name, value) for name, value in facts.items() if value is not None]
    return f"<p>{escape(title)}</p>{html_table(('', ''), rows)}"


def html_from_rich(table: "Table") -> str:
    """Return a table of the terminal."""
    columns = [list(column.cells) for column in table.columns]
    header = [str(column.header) for column in table.columns]
    return html_table(header, zip(*columns, strict=True))
