"""What the tests of this folder share."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from programs import loaded

from lowering.lowered import Lowered
from lowering.xla import backend as xla


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Let go of every executable of a module: each holds hundreds of memory maps, and Linux gives
    a process 65,530 (vm.max_map_count); XLA ends in a segmentation fault where none is left."""
    yield
    loaded.cache_clear()
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def short_places(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lower operations with the line that calls them, and without that line's callers: 10 % of the
    time of a test. Tests that tell operations apart by their places have the callers, too."""
    name = "jax_traceback_in_locations_limit"
    callers = jax.config.values[name]
    if request.path.stem not in ("test_blame", "test_collectives", "test_pipeline_structure"):
        jax.config.update(name, 1)
    yield
    jax.config.update(name, callers)


@pytest.fixture(autouse=True, scope="module")
def little_optimization() -> Iterator[None]:
    """Let XLA optimize programs, and not what tests compute beside them: a fifth of their time."""
    name, compile_program = "jax_disable_most_optimizations", xla._compile

    def compile_with_its_options(lowered: Lowered) -> Any:
        jax.config.update(name, False)
        try:
            return compile_program(lowered)
        finally:
            jax.config.update(name, True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_compile", compile_with_its_options)
        jax.config.update(name, True)
        yield
        jax.config.update(name, False)


@pytest.fixture
def little_effort() -> Iterator[None]:
    """For programs in which XLA:TPU's slowest passes change nothing that is asked.

    Processor seconds for the step of ZeRO-2 on v5e:2x4: 32, so 7 (jaxlib 0.10.2).
    """
    name = "jax_exec_time_optimization_effort"
    jax.config.update(name, -1.0)
    yield
    jax.config.update(name, 0.0)
