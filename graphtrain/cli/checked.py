"""Checks of a configuration before a command does anything that takes long."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.api.checks.problem import Problem
    from graphtrain.api.checks.report import Purpose


def check(
    config: Path,
    overrides: Sequence[str],
    target: str | None,
    purpose: str,
    *,
    outputs: Mapping[str, Path | None] | None = None,
    allowed_changes: Sequence[str] = (),
) -> None:
    """Check a configuration; print problems that are only warnings for this purpose.

    Args:
        config: the file.
        overrides: settings that replace its own.
        target: machine that replaces its own.
        purpose: name of a `Purpose` in graphtrain.api.checks.report.
        outputs: files that will be written, by the option that names each.
        allowed_changes: settings that may differ from those of the checkpoint.

    Raises:
        ConfigError: one line for each problem, with its place.
    """
    from graphtrain.api.checks import report
    from graphtrain.config import load_config
    from graphtrain.errors import ConfigError

    chosen: Purpose = getattr(report, purpose)
    found = report.problems(
        load_config(config, overrides, target),
        chosen,
        outputs=outputs,
        allowed_changes=allowed_changes,
    )
    if not found:
        return
    lines = _with_places(found, config, overrides, target)
    if errors := [
        line for line, one in zip(lines, found, strict=True) if one.kind in chosen.errors
    ]:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    for line in dict.fromkeys(lines):
        say(f"warning: {line}")


def _with_places(
    found: Sequence["Problem"], config: Path, overrides: Sequence[str], target: str | None
) -> list[str]:
    """Return each problem as a line that begins with the place of its cause."""
    from graphtrain.config.overrides import parse_overrides
    from graphtrain.config.problems import ConfigSource, locate, mentioned_settings
    from sharding_rules.documents import read_text

    source = ConfigSource(str(config), read_text(config), parse_overrides(overrides, target))

    def place(problem: "Problem") -> str:
        if problem.location is not None:
            return problem.location
        return locate(source, problem.settings or mentioned_settings(problem.message))

    return [": ".join(filter(None, [place(one), one.message])) for one in found]
