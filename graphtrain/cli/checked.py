"""Checks of a configuration before a command does anything that takes long."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.api.checks.checked import CheckedConfig
    from graphtrain.api.checks.purpose import Purpose
    from graphtrain.config.load import Source


def check(
    config: "Source",
    overrides: Sequence[str],
    target: str | None,
    purpose: "Purpose",
    *,
    outputs: Mapping[str, Path | None] | None = None,
    allowed_changes: Sequence[str] = (),
    rank: int = 0,
) -> "CheckedConfig":
    """Load and check a configuration; print problems that are only warnings for this purpose.

    Args:
        config: the file, or a configuration.
        overrides: settings that replace its own.
        target: machine that replaces its own.
        purpose: what the command does with it.
        outputs: files that will be written, by the option that names each.
        allowed_changes: settings that may differ from those of the checkpoint.
        rank: rank of this process; rank 0 warns if the file of a run was changed.

    Raises:
        ConfigError: one line for each problem, with its place.
    """
    from graphtrain.api.checks.checked import check_config

    return check_config(
        config,
        purpose,
        overrides=overrides,
        target=target,
        outputs=outputs,
        allowed_changes=allowed_changes,
        rank=rank,
        warn=lambda line: say(f"warning: {line}"),
    )
