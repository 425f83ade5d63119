"""The strategy of `--search`: that of the run so far, or the winner of a search."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.api.checks.purpose import SEARCH
from graphtrain.api.configuration import (
    Observer,
    Settings,
    checked_config,
    log,
    observe_nothing,
    open_cache,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphtrain.api.configuration import Source
    from graphtrain.cache import Cache
    from graphtrain.config.schema import Config
    from graphtrain.planning.candidate import Candidate
    from graphtrain.planning.search import SearchResult

DEFAULT_VERIFIED = 3  # strategies that a search compiles


def searched_config(
    config: Source,
    *,
    compile: bool,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    hint: str,
    observe: Observer = observe_nothing,
    log: Callable[[str], None] = log,
) -> Config:
    """Return a configuration with the strategy of its run or, of a new run, of its last search.

    Args:
        config: a configuration, in any form that load_config accepts.
        compile: whether to search, and to compile the best strategies, if nothing was searched.
        target: machine, in place of program.target.
        set: settings to change.
        cache: directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        fresh: whether the run starts again, so that its checkpoints do not count.
        hint: what searches and compiles, for the error message.
        observe: called with the progress of compilations.
        log: called with the strategy and where it is from.

    Raises:
        MissingProgram: nothing was searched for this configuration.
        UserError: no strategy fits, or something else that the user can change.
    """
    from graphtrain.config.phases import describe_placement
    from graphtrain.config.resolve import resolve
    from graphtrain.planning.chosen import remembered

    given = checked_config(config, SEARCH, set=set, target=target).config
    store = open_cache(cache)
    chosen, origin = None if fresh else _of_run(given), f"as in {given.run.directory}"
    if chosen is None:
        chosen, origin = remembered(store, given), "of the last search"
    if chosen is None and compile:
        chosen, origin = _search(given, store, observe), "of a search"
    if chosen is None:
        from graphtrain.errors import MissingProgram

        raise MissingProgram(
            f"no strategy has been searched for this configuration on {given.program.target} with "
            f"these versions, numbers of the machine and limits; run: {hint}"
        )
    log(f"strategy {origin}: {describe_placement(resolve(chosen.program))}")
    from graphtrain.planning.ranking import batch_change

    if change := batch_change(given.program.batch, chosen.program.batch, given.run.steps):
        log(change)
    return chosen


def _of_run(config: Config) -> Config | None:
    """Return a configuration with the strategy that its run has had on the same target.

    None without a checkpoint, whose config.toml is that of the run.
    """
    from graphtrain.checkpoints.steps import saved_steps
    from graphtrain.config.load import load_config
    from graphtrain.config.run_record import CONFIG
    from graphtrain.planning.chosen import strategy_of, with_strategy

    directory = Path(config.run.directory)
    if not (directory / CONFIG).is_file() or not saved_steps(directory / "checkpoints"):
        return None
    recorded = load_config(directory / CONFIG).program
    if recorded.target != config.program.target:
        return None
    return with_strategy(config, strategy_of(recorded))


def search_strategies(
    config: Config,
    store: Cache,
    *,
    verify: int = DEFAULT_VERIFIED,
    keep: int = 1,
    jobs: int | None = None,
    observe: Observer = observe_nothing,
) -> tuple[SearchResult, Sequence[Candidate]]:
    """Search, compile the best strategies, and remember the winner; return all, best first.

    The reasons of the result compare compiled steps with each other, and estimates with estimates.

    Args:
        config: the configuration; its own strategy does not matter.
        store: the cache.
        verify: number of fitting strategies to compile; 0: only estimate, and remember nothing.
        keep: number of strategies to return.
        jobs: number of compilations in parallel; None for the number of cores.
        observe: called with the progress of compilations.
    """
    from graphtrain.planning.chosen import remember
    from graphtrain.planning.search import search
    from graphtrain.planning.verify import COMPILATIONS_PER_STRATEGY, compile_best

    count = max(keep, COMPILATIONS_PER_STRATEGY * verify)
    result = search(config.program, count, config.run.search, observe)
    compiled = compile_best(result.ranked, store, verify, jobs=jobs, observe=observe)
    fitting = [candidate for candidate in compiled if candidate.fits]
    ranked = [*fitting, *result.ranked[len(compiled) : keep], *compiled[len(fitting) :]]
    if verify and fitting:
        remember(store, config, fitting[0].program.settings)
    return replace(result, compiled=compiled), ranked


def _search(config: Config, store: Cache, observe: Observer) -> Config:
    """Search for a strategy.

    Raises:
        PlanError: none fits.
    """
    from graphtrain.errors import PlanError
    from graphtrain.planning.chosen import strategy_of, with_strategy

    result, ranked = search_strategies(config, store, observe=observe)
    if not ranked or not ranked[0].fits:
        reasons = next(iter(result.rejected.values()), "")
        raise PlanError(
            f"no strategy fits on {config.program.target}: {reasons}; graphtrain plan search shows "
            "what would, with other targets and settings"
        )
    return with_strategy(config, strategy_of(ranked[0].program.settings))
