"""Names of stacked parameters whose rows are some blocks of a list; imports no PyTorch.

"model/layers/3-60/mlp/up_proj/weight" stacks the parameters of blocks 3 to 60, and
"model/layers/0-18by6/..." those of blocks 0, 6, 12 and 18.
"""

from __future__ import annotations

import re

_RANGE = re.compile(r"(\d+)-(\d+)(?:by(\d+))?")


def range_name(blocks: range) -> str:
    """Return the component of a path that names these blocks."""
    step = f"by{blocks.step}" if blocks.step > 1 else ""
    return f"{blocks[0]}-{blocks[-1]}{step}"


def blocks_of(component: str) -> range | None:
    """Return the blocks that a component of a path names; None if it names none."""
    if (match := _RANGE.fullmatch(component)) is None:
        return None
    first, last, step = (int(number or 1) for number in match.groups())
    return range(first, last + 1, step) if step and last > first else None
