"""Loading of a configuration that is checked before anything that takes long."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from graphtrain.api.checks.problem import Problem
from graphtrain.api.checks.purpose import Purpose
from graphtrain.api.checks.report import problems
from graphtrain.config.load import Source, UnknownVocabulary, config_source, load_config
from graphtrain.config.problems import locate, mentioned_settings
from graphtrain.config.schema import Config
from graphtrain.errors import ConfigError

_VOCAB = ("program", "model", "vocab")


@dataclass(frozen=True)
class CheckedConfig:
    """A configuration in which nothing is known to be wrong for a purpose."""

    config: Config
    purpose: Purpose
    source: Source  # that it was loaded from
    overrides: tuple[str, ...] = ()
    target: str | None = None

    def vary(self, changes: Sequence[str]) -> Config:
        """Load the configuration with further changes, which are not checked."""
        named_target = [f"program.target={self.target}"] if self.target else []
        return load_config(self.source, [*self.overrides, *named_target, *changes])


def check_config(
    source: Source,
    purpose: Purpose,
    *,
    overrides: Sequence[str] = (),
    target: str | None = None,
    outputs: Mapping[str, Path | None] | None = None,
    allowed_changes: Sequence[str] = (),
    rank: int = 0,
    warn: Callable[[str], None] = warnings.warn,
) -> CheckedConfig:
    """Load a configuration, and refuse it if something is known to be wrong for a purpose.

    Args:
        source: a configuration, in any form that load_config accepts.
        purpose: what it is going to be used for.
        overrides: settings that replace its own.
        target: machine that replaces its own.
        outputs: files that will be written, by the option that names each.
        allowed_changes: settings that may differ from those of the checkpoint.
        rank: rank of this process. All ranks read the same file; rank 0 warns if it was changed.
        warn: called with each problem that is only a warning for this purpose.

    Raises:
        ConfigError: one line for each problem, with its place.
    """
    unknown: UnknownVocabulary | None = None
    try:
        with nullcontext() if rank == 0 else warnings.catch_warnings(action="ignore"):
            config = load_config(source, overrides, target)
    except UnknownVocabulary as error:
        config, unknown = error.config, error
    found = problems(config, purpose, outputs=outputs, allowed_changes=allowed_changes)
    if unknown is not None:
        # What compares the placeholder with something would be a wrong diagnosis.
        found = [one for one in found if _VOCAB not in one.settings and one.kind != "checkpoint"]
    if not found and unknown is None:
        return CheckedConfig(config, purpose, source, tuple(overrides), target)
    lines = _with_places(found, source, overrides, target)
    errors = [line for line, one in zip(lines, found, strict=True) if one.kind in purpose.errors]
    if unknown is not None and (unknown.of_data or not errors):
        is_reported = any(str(unknown).endswith(line) for line in errors)  # the damage of the data
        errors += [] if is_reported else [str(unknown)]
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    for line in dict.fromkeys(lines if rank == 0 else ()):
        warn(line)
    return CheckedConfig(config, purpose, source, tuple(overrides), target)


def _with_places(
    found: Sequence[Problem], source: Source, overrides: Sequence[str], target: str | None
) -> list[str]:
    """Return each problem as a line that begins with the place of its cause."""
    text = config_source(source, overrides, target)

    def place(problem: Problem) -> str:
        if problem.location is not None:
            return problem.location
        return locate(text, problem.settings or mentioned_settings(problem.message))

    return [": ".join(filter(None, [place(one), one.message])) for one in found]
