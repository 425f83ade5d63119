"""Plan of serving: compile the programs that serve, or estimate them, and find what fits.

The programs are compiled into the cache, under the keys that `graphtrain compile --for serve` uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer, TaskOutcome
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.serving_assessment import ServingAssessment
from graphtrain.cost_model.serving_findings import findings
from graphtrain.cost_model.serving_time import predict_collectives, speeds
from graphtrain.graphs.names import ServingPurpose, graphs_for
from graphtrain.planning.serving_limits import confirmed_slots, longest_context, most_slots
from graphtrain.planning.serving_programs import (
    compile_serving,
    parameter_bytes,
    served_sizes,
    serving_memory,
)
from graphtrain.planning.tables import printed_text
from lowering.hlo.collectives import Collective

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class ServingAnswer:
    """Answer of `graphtrain plan --for serve`, for one program on one target.

    str() is the output of the command.
    """

    purpose: ServingPurpose
    assessment: ServingAssessment

    @property
    def fits(self) -> bool:
        """Return whether all programs fit in the memory of a device."""
        return self.assessment.memory.fits

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of a device."""
        return self.assessment.memory.peak

    @property
    def largest_slots(self) -> int:
        """Return the largest number of slots that fits with this context; 0 if none does."""
        return self.assessment.slots.value

    @property
    def longest_context(self) -> int:
        """Return the longest context that fits with this number of slots; 0 if none does."""
        return self.assessment.context.value

    def __repr__(self) -> str:
        from graphtrain.planning.serving_text import fit_summary

        return f"<ServingAnswer: {fit_summary(self.assessment)}>"

    def __str__(self) -> str:
        return printed_text(self.print)

    def print(self, console: Console) -> None:
        """Print the output of the command on a console of rich."""
        from graphtrain.planning.serving_text import print_serving

        print_serving(console, self.assessment)


def answer_serving(
    program: ResolvedProgram,
    purpose: ServingPurpose,
    cache: Cache,
    *,
    compile: bool = True,
    confirm: bool = True,
    observe: Observer = lambda label, stage: None,
) -> ServingAnswer:
    """Assess the programs that serve, or generate, with the weights of a program.

    Args:
        program: the program that is, or was, trained.
        purpose: generate one sequence or a batch, evaluate tasks, or serve many.
        cache: cache to read from and compile into.
        compile: if False, only estimate.
        confirm: if True, compile the program that needs most with the largest number of slots.
        observe: called with each label and stage of a compilation.

    Raises:
        PlanError: the sizes of an imported model are not known.
        ShardingError: the rules cannot split an array.
    """
    served, graphs = graphs_for(program, purpose)
    model = served_sizes(served)
    compiled, failed = {}, {}
    if compile:
        compiled, failed = compile_serving(program, purpose, cache, observe)
    memory = serving_memory(model, graphs, compiled, failed, parameter_bytes(served))
    slots = most_slots(model, memory)
    if confirm and compiled and slots.value and purpose == "serve":
        slots = confirmed_slots(program, model, memory, slots, cache, observe)
    collectives = {
        name: [Collective.from_record(one) for one in artifact.record["collectives"]]
        for name, artifact in compiled.items()
    }
    context = longest_context(model, memory)
    step = "decode" if "decode" in graphs else "decode_one"
    sent = collectives.get(step)
    assessment = ServingAssessment(
        model=model,
        memory=memory,
        slots=slots,
        context=context,
        speeds=tuple(one for one in speeds(model, collectives) if one.graph in graphs),
        collectives=tuple(predict_collectives(model, step) if sent is None else sent),
        collectives_source="estimate" if sent is None else "compiler",
        findings=findings(model, memory, slots, context, collectives),
        note=_note(failed),
    )
    return ServingAnswer(purpose, assessment)


def _note(failed: Mapping[str, TaskOutcome]) -> str:
    """Return why programs are not compiled, each reason once."""
    reasons = {one.error or "the program was removed from the cache" for one in failed.values()
               if one.kind != "LoweringError"}  # fmt: skip
    return "; ".join(sorted(reasons))
