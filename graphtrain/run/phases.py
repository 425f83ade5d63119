"""Phases of a run while it trains: the programs of all of them, the data of the current one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphtrain.config.phases import TrainingPhase, training_phases
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.run.agreement import on_all_ranks
from graphtrain.run.batch_placement import BatchPlacement
from graphtrain.run.programs import LoadedPrograms

OpenData = Callable[[TrainingPhase, BatchPlacement], Any]  # returns a data loader


def remaining_phases(program: ResolvedProgram, steps: int, start: int) -> list[TrainingPhase]:
    """Return the phases that a run still trains, and that of the last completed step.

    Args:
        program: The program.
        steps: Last step of the run.
        start: Completed steps.
    """
    return [
        phase
        for phase in training_phases(program)
        if (phase.end is None or phase.end >= max(start, 1)) and phase.start < max(steps, 1)
    ]


def index_of_phase(phases: Sequence[TrainingPhase], step: int) -> int:
    """Return the index of the phase of the last completed step; of the first one at step 0."""
    return next(index for index, phase in enumerate(phases) if phase.holds(step))


@dataclass(frozen=True)
class PhasePrograms:
    """A phase, its compiled programs, and what its checkpoints record of the run."""

    phase: TrainingPhase
    programs: LoadedPrograms
    identity: dict[str, Any]


class PhaseSequence:
    """The phases of a run, of which one is current.

    All programs are looked up before the first step, so that none of a later phase can be missing.
    They are loaded when their phase begins.
    """

    def __init__(
        self,
        phases: Sequence[PhasePrograms],
        current: int,
        open_data: OpenData,
        graph: str = "train",
    ) -> None:
        """Begin in one of the phases; `open` opens its data.

        Args:
            phases: Phases in order.
            current: Index of the phase of the last completed step.
            open_data: Opens the data loader of a phase.
            graph: Name of the graph that takes the batches.
        """
        self.phases, self._open_data = phases, open_data
        self._index, self._graph = current, graph
        self._opened: tuple[Any, BatchPlacement] | None = None

    @property
    def current(self) -> PhasePrograms:
        """The phase of the next step or, at the end of a phase, of the last step."""
        return self.phases[self._index]

    @property
    def loader(self) -> Any:
        """The data loader of the current phase."""
        assert self._opened is not None
        return self._opened[0]

    @property
    def placement(self) -> BatchPlacement:
        """Placement of the batches of the current phase."""
        assert self._opened is not None
        return self._opened[1]

    def open(self) -> None:
        """Open the data of the current phase."""
        phase, programs = self.current.phase, self.current.programs
        placement = BatchPlacement(programs[self._graph].inputs("batch"), phase.program.target)
        self._opened = self._open_data(phase, placement), placement

    def is_over(self, step: int) -> bool:
        """Return whether the current phase has no step after `step`."""
        return step == self.current.phase.end

    def advance(self) -> None:
        """Begin the next phase: load its programs, and continue the data where this one stopped."""
        before = self.loader
        position = before.state()
        before.close()
        self._index += 1
        on_all_ranks(self.current.programs.load_all)
        self.open()
        self.loader.continue_from(position)

    def close(self) -> None:
        """Stop prefetching."""
        if self._opened is not None:
            self.loader.close()
