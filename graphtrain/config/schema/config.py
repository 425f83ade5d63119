"""The root of a configuration file."""

from pydantic.dataclasses import dataclass

from graphtrain.config.schema.phase import PhaseError, describe_phase
from graphtrain.config.schema.program import Program
from graphtrain.config.schema.run import Run
from graphtrain.config.schema.torch_model import is_imported
from graphtrain.config.schema.types import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A configuration: `program` can change compiled code; `run` cannot."""

    program: Program
    run: Run

    def __post_init__(self) -> None:
        adapter, is_dpo = self.program.adapter, self.program.loss.kind == "dpo"
        if (adapter is not None or is_dpo) and self.run.init_from is None:
            setting = "program.adapter" if adapter is not None else 'program.loss.kind = "dpo"'
            raise ValueError(
                f"{setting} starts from existing weights; set run.init_from to a converted folder "
                "or to the directory of a run"
            )
        if self.run.init_adapter_from is not None and adapter is None:
            raise ValueError("run.init_adapter_from needs a [program.adapter]; add one")
        generates = self.run.samples is not None or self.run.tasks is not None
        if generates and adapter is not None and is_imported(self.program.model):
            setting = "run.samples" if self.run.samples is not None else "run.tasks"
            raise ValueError(
                f"{setting} generates with merged weights, and program.adapter of model.hf or "
                f"model.torch cannot be merged for generation; remove {setting}"
            )
        schedule = self.run.learning_rate.schedule
        if self.program.optimizer.kind == "schedule_free" and schedule != "constant":
            raise ValueError(
                'program.optimizer.kind = "schedule_free" takes the place of a schedule, and '
                f'run.learning_rate.schedule = "{schedule}"; set it to "constant" (a warm-up stays)'
            )
        if self.run.spikes.on_spike == "skip" and not self.program.optimizer.skip_spikes:
            raise ValueError(
                'run.spikes.on_spike = "skip" needs program.optimizer.skip_spikes = true, with '
                "which the compiled step takes the limits as inputs; set it, or use "
                'on_spike = "rewind", which needs no other program'
            )
        self._check_phases()

    def _check_phases(self) -> None:
        """Refuse phases that the run does not reach, or whose model it cannot generate with."""
        run = self.run
        for index, phase in enumerate(self.program.phases):
            name, within = describe_phase(index + 1, phase), ("program", "phase", str(index))
            if phase.until > run.steps:
                raise PhaseError(
                    within,
                    f"program.{name} ends after the last step, run.steps = {run.steps}; lower "
                    "until, remove the phase or raise run.steps",
                )
            if phase.changes_model and (run.samples is not None or run.tasks is not None):
                setting = "run.samples" if run.samples is not None else "run.tasks"
                raise PhaseError(
                    within,
                    f"program.{name} has a model with other rotary positions, and {setting} "
                    f"generates with that of [program.model]; remove {setting}, or rope_theta and "
                    "rope_scaling of the phase",
                )
