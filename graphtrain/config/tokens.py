"""Number of tokens that a run trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphtrain.config.schema import Config


def tokens_of_run(config: Config) -> int:
    """Return the tokens of all steps of a run, in all its phases."""
    program, tokens, before = config.program, 0, 0
    for phase in program.phases:
        tokens += (phase.until - before) * program.in_phase(phase).batch.tokens
        before = phase.until
    return tokens + (config.run.steps - before) * program.batch.tokens
