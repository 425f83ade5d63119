"""What XLA says while it compiles, of which it keeps no other record."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# The partitioner's last resort (jax 0.10 and 0.11): every device gets the whole array.
_REPLICATED = re.compile(
    r"Involuntary full rematerialization\. .*? from sharding (?P<before>\{.*?\}(?: \w+\})?) "
    r"to (?P<after>\{.*?\}) efficiently for HLO operation %\S+ = (?P<shape>[^\s{]+)"
    r".*?op_name=\"(?P<scope>[^\"]*)\""
)


@contextmanager
def overhear() -> Iterator[list[dict[str, str]]]:
    """Fill the list, at the end, with the arrays that the compiler made whole to split them anew.

    The compiler writes to the process's standard error, past Python; it is passed on there.
    """
    found: list[dict[str, str]] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            log.seek(0)
            text = log.read()
            os.write(2, text)
            found += replicated(text.decode(errors="replace"))


def replicated(log: str) -> list[dict[str, str]]:
    """Shape, scope and both shardings of arrays that the partitioner replicated, each once."""
    told = [match.groupdict() for match in _REPLICATED.finditer(log)]
    return [one for index, one in enumerate(told) if one not in told[:index]]
