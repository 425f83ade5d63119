"""The strategy that a search chose: applied to a configuration, kept in the cache, found again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.compile.request_keys import source_digests
from graphtrain.config.schema import Config, Mesh, PipelineSettings, Program
from graphtrain.config.schema.program import reason_of
from graphtrain.cost_model.profiled_time import current_profile
from graphtrain.errors import PlanError
from graphtrain.files import content_digest, json_digest
from graphtrain.graphs.open_model import open_language_model
from graphtrain.planning.given import without_strategy
from lowering.machine.target import Target
from lowering.machine.toolchain import Toolchain

# Words about a machine's table, not numbers of the machine.
_DESCRIPTIONS = {"source", "file", "file_numbers"}


def search_key(config: Config) -> CacheKey:
    """Return the key of a search: what it is given, without the strategy that it chooses."""
    program = without_strategy(config.program)
    target = Target.parse(program.target)
    settings = asdict(program)
    for name in ("target", "rules", "serve", "dump"):
        del settings[name]
    settings["model"] = open_language_model(program.model).key_ingredients()
    return CacheKey.of(
        graph="search",
        program=settings,
        rules=_kept_rules(program),
        limits=asdict(config.run.search),
        sources=source_digests(),
        target=target.key_parts(),
        estimates=_estimated_with(target),
        toolchain=asdict(Toolchain.current(target.platform)),
    )


def searched_program(program: Program) -> str:
    """Return a digest of what a search is about: target, model and length of sequences."""
    searched = without_strategy(program)
    model = open_language_model(searched.model).key_ingredients()
    return json_digest([searched.target, searched.batch.seq_len, model])


def _estimated_with(target: Target) -> dict[str, Any]:
    """Return the numbers of a machine that rank strategies; keys of programs leave them out."""
    table, achieved = target.specification, target.achieved
    profile = current_profile()[0] if target.machine == "cpu" else None
    return {
        "machine": {name: value for name, value in table.items() if name not in _DESCRIPTIONS},
        "achieved": None if achieved is None else asdict(achieved),
        "profile": asdict(profile) if profile else None,
        "usable_memory_bytes": target.usable_memory_bytes,  # with XLA_CLIENT_MEM_FRACTION
    }


def _kept_rules(program: Program) -> list[str]:
    """Return the rules that a search keeps: ulysses, and the contents of the user's files."""
    named = [name for name in program.rules if name == "ulysses"]
    return named + [content_digest(Path(name)) for name in program.rules if name.endswith(".toml")]


def strategy_of(program: Program) -> dict[str, Any]:
    """Return the settings that a search chooses, as JSON."""
    return {
        "mesh": asdict(program.mesh),
        "rules": list(program.rules),
        "pipeline": asdict(program.pipeline),
        "global_batch_size": program.batch.global_batch_size,
        "microbatches": program.batch.microbatches,
        "remat": program.model.remat,
        "offload_to_host": program.optimizer.offload_to_host,
    }


def with_strategy(config: Config, strategy: Mapping[str, Any]) -> Config:
    """Return a configuration with the settings of strategy_of(), and with its own phases.

    Raises:
        PlanError: they do not suit the configuration.
    """
    program = config.program
    try:
        pipeline = strategy["pipeline"]
        if (layers := pipeline["layers_per_stage"]) is not None:
            pipeline = pipeline | {"layers_per_stage": tuple(layers)}
        batch = {
            "global_batch_size": strategy["global_batch_size"],
            "microbatches": strategy["microbatches"],
            "padding_sequences": 0,
        }
        changed = replace(
            program,
            mesh=Mesh(**strategy["mesh"]),
            rules=tuple(strategy["rules"]),
            pipeline=PipelineSettings(**pipeline),
            batch=replace(program.batch, **batch),
            model=replace(program.model, remat=strategy["remat"]),
            optimizer=replace(program.optimizer, offload_to_host=strategy["offload_to_host"]),
        )
        return replace(config, program=changed)
    except ValueError as error:
        raise PlanError(
            f"the strategy does not suit this configuration: {reason_of(error)}"
        ) from None
    except (KeyError, TypeError) as error:  # not as strategy_of() writes it
        raise PlanError(f"the strategy is damaged, {error!r}; search again") from None


def remember(cache: Cache, config: Config, chosen: Program) -> None:
    """Store the strategy that a search of a configuration chose.

    Raises:
        CacheError: the cache is not writable.
    """
    cache.store_search(search_key(config), strategy_of(chosen))


def remembered(cache: Cache, config: Config) -> Config | None:
    """Return a configuration with the strategy that its last search chose; None without one.

    Raises:
        PlanError: the strategy does not suit the configuration.
    """
    strategy = cache.stored_search(search_key(config))
    return None if strategy is None else with_strategy(config, strategy)
