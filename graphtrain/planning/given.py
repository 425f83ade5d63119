"""Input of a search: a program without the strategy that the search chooses."""

from __future__ import annotations

from dataclasses import replace

from graphtrain.config.schema import Program
from graphtrain.config.schema.flax_model import FlaxModel


def without_strategy(program: Program) -> Program:
    """Return a program with the default strategy, and with ulysses and the user's rules files."""
    is_ulysses = "ulysses" in program.rules
    built_in = ("ulysses" if is_ulysses and name == "context" else name for name in Program.rules)
    user_files = (name for name in program.rules if name.endswith(".toml"))
    model = program.model
    return replace(
        program,
        mesh=Program.mesh,
        rules=(*built_in, *user_files),
        pipeline=Program.pipeline,
        batch=replace(program.batch, microbatches=1, padding_sequences=0),
        model=model if isinstance(model, FlaxModel) else replace(model, remat=type(model).remat),
        optimizer=replace(program.optimizer, offload_to_host=False),
    )
