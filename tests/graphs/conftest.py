"""What the tests of this folder share."""

from collections.abc import Iterator

import jax
import pytest
from programs import loaded


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Let go of every executable of a module: each holds hundreds of memory maps, and Linux gives
    a process 65,530 (vm.max_map_count); XLA ends in a segmentation fault where none is left."""
    yield
    loaded.cache_clear()
    jax.clear_caches()
