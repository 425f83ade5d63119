"""Search for PyTorch models: the module is created without weights to learn its arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphtrain.config.schema import Program, TorchModel
from graphtrain.cost_model.tower import tower_of
from graphtrain.planning.candidate import Candidate
from graphtrain.planning.candidates import SearchOptions
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError

_REMATS = ("none", "dots", "full")


@dataclass(frozen=True)
class TorchSearch:
    """A PyTorch model, ranked by the strategies of a native model of the same sizes."""

    program: Program
    specs: dict[str, ArraySpec]
    not_tried: dict[str, str]  # families that the model does not support, with the reason
    period: int = 1  # number of blocks after which they repeat; a stage holds whole repetitions

    @classmethod
    def of(cls, program: Program) -> TorchSearch:
        """Create the module, to find its arrays and whether it supports pipeline parallelism."""
        from graphtrain.torch_frontend.language_model import TorchLanguageModel

        assert isinstance(program.model, TorchModel)
        opened = TorchLanguageModel(program.model).opened()
        from graphtrain.torch_frontend.pipeline_parts import parts_of

        not_tried = {"context": "not tried for PyTorch models; see docs/guides/torch.md, Attention"}
        period = 1
        try:
            blocks = parts_of(opened).blocks
            period = blocks.stack.period
            if blocks.outside:
                not_tried["stage"] = (
                    f"not tried, because {blocks.which()}; "
                    "set program.mesh.stage and program.pipeline.layers_per_stage"
                )
        except ShardingError as error:
            not_tried["stage"] = f"not tried: {error}"
        return cls(program, opened.specs(), not_tried, period)

    @property
    def choices(self) -> SearchOptions:
        staged = "stage" not in self.not_tried
        return SearchOptions(
            staged,
            context=False,
            remats=_REMATS,
            arrays=self.specs,
            period=self.period,
            tower=tower_of(self.program),
        )

    def with_torch_model(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the native model replaced by the PyTorch model."""
        native_program = candidate.program
        model = replace(self.program.model, remat=native_program.model.remat)
        adapter, loss = self.program.adapter, self.program.loss
        settings = replace(native_program.settings, model=model, adapter=adapter, loss=loss)
        resolved = native_program.with_settings(settings)
        program = replace(resolved, tower=None, stands_for_imported=False)
        return replace(candidate, program=program)
