"""Facts of a run beside its curves: state, plan, checkpoints, goodput."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from graphtrain.cache import Cache
from graphtrain.checkpoints.listing import StoredCheckpoint, leftovers, list_local
from graphtrain.config.load import load_config
from graphtrain.config.phases import program_of_step
from graphtrain.config.resolve import resolve
from graphtrain.config.run_record import CONFIG
from graphtrain.config.schema import Config
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.errors import UserError
from graphtrain.planning.predicted import PredictedStep, predict_step
from graphtrain.run.goodput.account import read_goodput
from graphtrain.run.goodput.text import goodput_json

_T = TypeVar("_T")
Facts = Mapping[str, Any]  # as JSON
_SHOWN = 100  # last starts, and last checkpoints


def goodput_facts(directory: Path) -> Facts:
    """Return the account of a run's wall time, or {"problem": why there is none}."""
    try:
        facts = goodput_json(read_goodput(directory))
    except UserError as error:
        return {"problem": str(error)}
    starts = facts["processes"]
    return facts | {"starts": len(starts), "processes": starts[-_SHOWN:]}


def checkpoint_facts(directory: Path) -> Facts:
    """Return the checkpoints of a run, and the steps of those that were begun and not completed."""
    try:
        found = list_local(directory)
        unfinished = [path.name.partition(".")[0] for path in leftovers(directory)]
    except FileNotFoundError:  # the run deletes one at this moment
        return {"problem": "the list changes at this moment"}
    except (OSError, UserError) as error:
        return {"problem": f"the checkpoints cannot be listed: {error}"}
    rows = [_checkpoint(one) for one in found[-_SHOWN:]]
    return {"count": len(found), "rows": rows, "unfinished": sorted(map(int, unfinished))}


def _checkpoint(one: StoredCheckpoint) -> Facts:
    loss = one.validation_loss
    is_finite = loss is not None and math.isfinite(loss)
    return asdict(one) | {"validation_loss": loss if is_finite else None}


class PlannedRun:
    """The configuration of a run, and what a plan predicts for its steps.

    Both are found out again when config.toml changes, as when a run resumes with other settings.
    """

    def __init__(self, directory: Path, cache: Cache) -> None:
        self._directory, self._cache = directory, cache
        self._config_identity: object = None
        self._config: Config | None = None
        self._problem: str | None = None
        self._phase: object = None
        self._predicted: PredictedStep | None = None
        self._why_unknown: str | None = None

    def facts(self, step: int) -> Facts:
        """Return the last step of the run, and the prediction for the phase of a step."""
        identity = _identity(self._directory / CONFIG)
        if identity is None:
            return {"problem": f"{CONFIG} does not exist yet"}
        if identity != self._config_identity:
            self._config_identity, self._phase = identity, None
            self._config, self._problem = _attempt(lambda: load_config(self._directory))
        if self._config is None:
            return {"problem": self._problem}
        ends = [phase.until for phase in self._config.program.phases]
        phase = identity, sum(step > end for end in ends)
        if phase != self._phase:
            self._phase = phase
            config = self._config
            self._predicted, self._why_unknown = _attempt(lambda: self._predict(config, step))
        facts: dict[str, Any] = {"steps": self._config.run.steps}
        if self._predicted is None:
            return facts | {"unknown": self._why_unknown}
        return facts | asdict(self._predicted)

    def _predict(self, config: Config, step: int) -> PredictedStep:
        if sizes_unknown(config.program):
            raise UserError("the sizes of a model of PyTorch are not known without building it")
        return predict_step(program_of_step(resolve(config.program), step), self._cache)


def _attempt(find: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """Return the result of a function, or why there is none; a page shows no warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return find(), None
    except (UserError, OSError) as error:
        return None, str(error)


def _identity(path: Path) -> object:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
