"""Names of the tensors that form the rows of a stacked array: they differ in the layer index."""

from __future__ import annotations

from collections.abc import Iterator

from graphtrain.torch_frontend.block_ranges import blocks_of


def rows_of(name: str, count: int, available_names: set[str]) -> Iterator[list[str]]:
    """Yield lists of `count` tensor names that result from a layer index in a name.

    The index is inserted (period 1), or replaces a position of a period of blocks, or the numbers
    of some blocks of a list.
    """
    components = name.split(".")
    for position in range(1, len(components)):
        prefix, suffix = ".".join(components[:position]), ".".join(components[position:])
        rows = [f"{prefix}.{number}.{suffix}" for number in range(count)]
        after = f"{prefix}.{count}.{suffix}"
        if rows and available_names.issuperset(rows) and after not in available_names:
            yield rows
        suffix = ".".join(components[position + 1 :])
        if components[position].isdigit() and suffix:
            numbers = _periodic_rows(
                int(components[position]), _numbers(prefix, suffix, available_names), count
            )
            if numbers:
                yield [f"{prefix}.{number}.{suffix}" for number in numbers]
        blocks = blocks_of(components[position])
        if blocks is not None and len(blocks) == count:
            rows = [f"{prefix}.{number}.{suffix}" for number in blocks]
            if available_names.issuperset(rows):
                yield rows


def _numbers(prefix: str, suffix: str, available_names: set[str]) -> set[int]:
    """Return the numbers between a prefix and a suffix in the names of tensors."""
    start, end = f"{prefix}.", f".{suffix}"
    middles = (
        name[len(start) : -len(end)]
        for name in available_names
        if name.startswith(start) and name.endswith(end)
    )
    return {int(middle) for middle in middles if middle.isdigit()}


def _periodic_rows(position: int, numbers: set[int], count: int) -> range:
    """Return the numbers of the blocks at a position of a period; empty if there are none.

    Args:
        position: Position in the period.
        numbers: Numbers of the blocks that have a tensor of this name; those at a position have all
            of them, or none.
        count: Number of periods.
    """
    for period in range(max(2, position + 1), max(numbers, default=0) + 1):
        is_inside = max(numbers) < count * period
        places = {number % period for number in numbers | {position}}
        rows = {place: range(place, count * period, period) for place in places}
        if is_inside and all(numbers.issuperset(inside) for inside in rows.values()):
            return rows[position]
    return range(0)
