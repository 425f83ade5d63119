"""A program whose compiler is not here: all that one command needs to finish it elsewhere."""

from lowering.lowered import Lowered
from lowering.errors import LoweringError


def unfinished(lowered: Lowered) -> LoweringError:
    return LoweringError("no compiler")
