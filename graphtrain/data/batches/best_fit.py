"""Best-fit decreasing bin packing of documents into rows, also of documents with images.

Source: Ding et al. 2024, "Fewer truncations improve language modeling", algorithm 1,
https://arxiv.org/abs/2404.10830
"""

from bisect import bisect_left, insort

import numpy as np


def best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Assign documents to rows by best-fit decreasing bin packing; return the row of each.

    Documents are placed longest first, each into the row where it leaves the least space. Rows are
    numbered from 0.

    Args:
        sizes: Positions that each document occupies, none above `length`.
        length: Positions of a row.
    """
    order = np.argsort(-sizes, kind="stable")
    rows_in_order = np.zeros(len(sizes), np.int64)
    started = _StartedRows(length)
    distinct_sizes, counts = np.unique(sizes, return_counts=True)
    first = 0
    for size, count in zip(distinct_sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        last = first + count
        while first < last:
            rows = started.place(size, last - first)
            rows_in_order[first : first + len(rows)] = rows
            first += len(rows)
    row_of = np.zeros(len(sizes), np.int64)
    row_of[order] = rows_in_order
    return row_of


def best_fit_with_images(
    sizes: np.ndarray, images: np.ndarray, length: int, most_images: int
) -> np.ndarray:
    """Assign documents to rows as `best_fit`, with at most `most_images` images in each row.

    Of the rows in which a document leaves the least space, it is placed into one that then has
    room for the fewest images.

    Args:
        sizes: Positions that each document occupies, none above `length`.
        images: Images of each document, none above `most_images`.
        length: Positions of a row.
        most_images: Images of a row.
    """
    started = [_StartedRows(length) for _ in range(most_images + 1)]  # by images still to place
    row_of = np.zeros(len(sizes), np.int64)
    count = 0
    for document in np.argsort(-sizes, kind="stable").tolist():
        size, needed = int(sizes[document]), int(images[document])
        candidates = [
            (free, room)
            for room in range(needed, most_images + 1)
            if (free := started[room].least_free(size)) is not None
        ]
        if candidates:
            free, room = min(candidates)
            row = started[room].take(free)
        else:
            free, room, row = length, most_images, count
            count += 1
        started[room - needed].add(free - size, [row])
        row_of[document] = row
    return row_of


class _StartedRows:
    """Rows of best-fit packing by their free positions; the last row added is taken first."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._free_sizes: list[int] = []  # distinct free positions, ascending
        self._rows: dict[int, list[int]] = {}
        self._count = 0

    def place(self, size: int, count: int) -> np.ndarray:
        """Place up to `count` documents of one size into rows with equally many free positions.

        A row takes as many of them as fit, because after each it is still the row in which the
        next one leaves the least space.

        Returns:
            The row of each placed document; at least one is placed.
        """
        index = bisect_left(self._free_sizes, size)
        is_new = index == len(self._free_sizes)
        free = self._length if is_new else self._free_sizes[index]
        per_row = free // size
        needed = -(-count // per_row)
        rows = self._start(needed) if is_new else self._take(index, needed)
        placed = min(count, per_row * len(rows))
        in_last_row = placed - per_row * (len(rows) - 1)
        self.add(free - per_row * size, rows[:-1])
        self.add(free - in_last_row * size, rows[-1:])
        return np.repeat(rows, per_row)[:placed]

    def least_free(self, size: int) -> int | None:
        """Return the fewest free positions of a row that has at least `size`; None: no row has."""
        index = bisect_left(self._free_sizes, size)
        return None if index == len(self._free_sizes) else self._free_sizes[index]

    def take(self, free: int) -> int:
        """Remove the row added last of those with `free` free positions, and return it."""
        (row,) = self._take(bisect_left(self._free_sizes, free), 1)
        return row

    def _start(self, count: int) -> list[int]:
        """Return the numbers of new rows."""
        rows = list(range(self._count, self._count + count))
        self._count += count
        return rows

    def _take(self, index: int, count: int) -> list[int]:
        """Remove up to `count` rows with the free positions at an index, and return them."""
        free = self._free_sizes[index]
        stored = self._rows[free]
        taken = stored[-count:][::-1]
        del stored[-count:]
        if not stored:
            del self._rows[free], self._free_sizes[index]
        return taken

    def add(self, free: int, rows: list[int]) -> None:
        """Add rows with `free` free positions; full ones take nothing more and are dropped."""
        if not free or not rows:
            return
        if free not in self._rows:
            self._rows[free] = []
            insort(self._free_sizes, free)
        self._rows[free].extend(rows)
