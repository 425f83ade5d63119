"""Compile all graphs of a run into the cache.

This process imports neither JAX nor the model. It looks up cache entries, starts worker processes
for missing graphs, and reports the outcomes.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from graphtrain.cache import Cache
from graphtrain.compile.tasks import CompilationReport, Limits, Observer, Task, TaskOutcome
from lowering.errors import OutOfMemory

_LONGEST_FIRST = ("train", "init", "evaluate")


def compile_tasks(
    tasks: Sequence[Task],
    cache: Cache,
    limits: Limits | None = None,
    *,
    retry_failed: bool = False,
    observe: Observer = lambda label, stage: None,
) -> CompilationReport:
    """Compile every graph that is not cached; a failure does not stop the others.

    Args:
        tasks: graphs to compile.
        cache: cache to look up and to fill.
        limits: limits on this host's resources.
        retry_failed: compile graphs again that this compiler has rejected before.
        observe: called with the label and stage of each task.
    """
    start_time = time.perf_counter()

    def stored_outcome(task: Task) -> TaskOutcome | None:
        return _cached(task, cache, observe) or (
            None if retry_failed else _stored_failure(task, cache, observe)
        )

    outcomes = {task.label: stored_outcome(task) for task in tasks}
    missing = [task for task in tasks if outcomes[task.label] is None]
    if missing:
        from graphtrain.compile.pool import Pool

        for task in missing:
            observe(task.label, "queued")
        pool = Pool(cache, limits or Limits(), stored_outcome, observe)
        outcomes |= pool.run(sorted(missing, key=_longest_first))
    by_label = {task.label: task for task in tasks}
    checked_outcomes = tuple(
        _check_fits_memory(outcome, by_label[outcome.label], cache)
        for outcome in outcomes.values()
        if outcome is not None
    )
    return CompilationReport(checked_outcomes, time.perf_counter() - start_time)


def _check_fits_memory(outcome: TaskOutcome, task: Task, cache: Cache) -> TaskOutcome:
    """Turn the outcome of a program that does not fit in device memory into a failure.

    The program stays in the cache, for plans.
    """
    target = task.program.target
    if outcome.digest is None or not (target.is_gpu or target.platform == "neuron"):
        return outcome
    from graphtrain.compile.memory_check import check_fits

    artifact = cache.get(outcome.digest)
    if artifact is not None and target.platform == "neuron":
        return replace(outcome, preflight=artifact.record["neuron"].get("preflight"))
    try:
        if artifact is not None:
            check_fits(task.program, artifact.record)
    except OutOfMemory as error:
        return replace(outcome, status="failed", error=str(error), kind=type(error).__name__)
    return outcome


def _cached(task: Task, cache: Cache, observe: Observer) -> TaskOutcome | None:
    start_time = time.perf_counter()
    digest = cache.program_digest(task.request)
    if digest is None:
        return None
    observe(task.label, "cached")
    return TaskOutcome(task.label, "cached", round(time.perf_counter() - start_time, 3), digest)


def _stored_failure(task: Task, cache: Cache, observe: Observer) -> TaskOutcome | None:
    """Return the failed outcome of the same graph with the same compiler, if one is stored."""
    failure = cache.stored_failure(task.request, task.graph)
    if failure is None:
        return None
    observe(task.label, "failed before")
    failure_directory = str(failure.directory)
    return TaskOutcome(
        task.label,
        "failed",
        0.0,
        None,
        failure.error,
        failure.error_type,
        failure_directory,
        attempts=0,
    )


def _longest_first(task: Task) -> int:
    """Sort key: the longest compilations first, so that none is left running alone at the end."""
    is_listed = task.graph in _LONGEST_FIRST
    return _LONGEST_FIRST.index(task.graph) if is_listed else len(_LONGEST_FIRST)
