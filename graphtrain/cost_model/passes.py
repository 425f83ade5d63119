"""Number of times that one device runs each part of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.config.computed_once import computed_once
from graphtrain.config.resolve import ResolvedProgram


@dataclass(frozen=True)
class Passes:
    """Forward passes of one device in a step.

    A pipeline has more of its layers than microbatches x layers: in the bubble, stages compute
    zeros and send them. Each stage embeds as many microbatches as the others, all at once, and
    computes their losses one after the other, or with 1f1b a share of every microbatch's positions.
    """

    layers: int  # passes of a layer
    embeddings: int  # passes of the embedding
    embedded: float  # microbatches in each
    heads: int  # passes of the LM head and the loss
    scored: float  # microbatches in each
    ahead: int = 0  # passes of the module that predicts the token after the next
    ticks: int = 0  # of a pipeline, in one direction; 0 without
    recomputes_stage: bool = False  # the backward pass begins with a forward pass of the stage
    recomputes_layers: bool = False  # that pass includes the output of each layer

    @staticmethod
    @computed_once
    def of(program: ResolvedProgram) -> Passes:
        """Return the passes of a program."""
        stages, microbatches = program.stages, program.batch.microbatches
        if stages is None:
            layers = program.model.layers * microbatches
            ahead = program.model.ahead_layers * microbatches
            return Passes(layers, microbatches, 1, microbatches, 1, ahead)
        at_once = program.pipeline.schedule == "1f1b"
        ticks = microbatches * stages.rounds + stages.stages - 1
        again = program.pipeline.recomputes_stages(program.model.remat)
        return Passes(
            layers=ticks * stages.rows_per_chunk,
            embeddings=1,
            embedded=microbatches / stages.stages,
            heads=microbatches if at_once else microbatches // stages.stages,
            scored=1 / stages.stages if at_once else 1,
            ahead=program.model.ahead_layers * microbatches // stages.stages,
            ticks=ticks,
            recomputes_stage=again,
            recomputes_layers=again and stages.rows_per_chunk > 1,
        )
