"""Seconds of compiled functions: of the processor on a CPU, else by the clock."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from graphtrain.api.measuring.core_speed import CoreSpeed
from graphtrain.cost_model.machine_profile import RUNS, Measured

_RUN_SECONDS = 0.02  # of one run, in which short functions are called many times
# Of this process. Without patience, which the worker grants, no run waits or is repeated.
SPEED = CoreSpeed()
# The graphs that are compared with have barriers that XLA:CPU would remove.
_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Compile a function for arguments, as graphs are compiled on this platform."""
    options: dict[str, str | bool] = dict(_OPTIONS) if jax.default_backend() == "cpu" else {}
    return jax.jit(function).lower(*arguments).compile(compiler_options=options)


def measure(function: Callable[..., Any], *arguments: Any) -> Measured:
    """Return the seconds of one call of a function that is compiled for the arguments."""
    return measure_compiled(compiled(function, *arguments), *arguments)


def measure_in_turn(function: Callable[..., Any], several: Sequence[tuple[Any, ...]]) -> Measured:
    """Return the seconds of one call of a function, with each of several arguments in turn.

    Where they are together larger than the caches, each call reads its own from memory: all
    others are used between two calls with the same.
    """
    return _measure(compiled(function, *several[0]), several)


def measure_compiled(program: Callable[..., Any], *arguments: Any) -> Measured:
    """Return the seconds of one call of a compiled function."""
    return _measure(program, [arguments])


def _measure(program: Callable[..., Any], several: Sequence[tuple[Any, ...]]) -> Measured:
    # One iterator for all runs: a run that began with the first arguments again would read from
    # the cache what the run before it left there.
    in_turn = itertools.cycle(several)
    _seconds(program, in_turn, len(several))  # the first call reads memory for the first time
    calls = round(_RUN_SECONDS / max(1e-6, _seconds(program, in_turn, 2)))
    calls = max(1, calls, math.ceil(len(several) / RUNS))  # the runs have all arguments
    SPEED.patience = SPEED.granted
    runs = [_run(program, in_turn, calls) for _ in range(RUNS)]
    every = [seconds for seconds, _ in runs]
    quiet = [seconds for seconds, full in runs if full] or [min(every)]
    median = max(1e-9, statistics.median(quiet))
    return Measured(median, round((max(every) - min(every)) / median, 3))


def _run(
    program: Callable[..., Any], in_turn: Iterator[tuple[Any, ...]], calls: int
) -> tuple[float, bool]:
    """Return the seconds of a call, and whether the cores had their full speed meanwhile."""
    if jax.default_backend() != "cpu":
        return _seconds(program, in_turn, calls), True
    return SPEED.run(lambda: _seconds(program, in_turn, calls))


def less(whole: Measured, part: float, times: float = 1.0) -> Measured:
    """Return what remains of a measured time without a known part, by number of repetitions."""
    rest = max(whole.seconds - part, 0.05 * whole.seconds) / times
    return Measured(rest, whole.spread)


def clock() -> Callable[[], float]:
    """Return the clock: on a CPU the processor time of all threads, else the time that passes.

    Processor time is not much longer on a busy machine.
    """
    return time.process_time if jax.default_backend() == "cpu" else time.perf_counter


def _seconds(program: Callable[..., Any], in_turn: Iterator[tuple[Any, ...]], calls: int) -> float:
    now = clock()
    began = now()
    result = None
    for arguments in itertools.islice(in_turn, calls):
        result = program(*arguments)
    jax.block_until_ready(result)
    return (now() - began) / calls
