"""The root of a configuration file."""

from pydantic.dataclasses import dataclass

from graphtrain.config.schema.program import Program
from graphtrain.config.schema.run import Run
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
        schedule = self.run.learning_rate.schedule
        if self.program.optimizer.kind == "schedule_free" and schedule != "constant":
            raise ValueError(
                'program.optimizer.kind = "schedule_free" takes the place of a schedule, and '
                f'run.learning_rate.schedule = "{schedule}"; set it to "constant" (a warm-up stays)'
            )
