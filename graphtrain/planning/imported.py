"""What a search does otherwise for a model of PyTorch, which is made but holds no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphtrain.config.schema import Imported, Program
from graphtrain.planning.candidates import Candidate, Choices
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError

_REMATS = ("none", "dots", "full")


@dataclass(frozen=True)
class Ranked:
    """A model whose strategies are those of a native one of its sizes, where it can follow them."""

    program: Program
    specs: dict[str, ArraySpec]
    not_tried: dict[str, str]  # by family: why

    @classmethod
    def of(cls, program: Program) -> Ranked:
        """Make the module, to know its arrays and whether it can be a pipeline."""
        from graphtrain.torch_frontend.model import open_model

        assert isinstance(program.model, Imported)
        opened = open_model(program.model)
        not_tried = {"context": "not tried for models of PyTorch; see docs/torch.md, Attention"}
        try:
            assert opened.parts
        except ShardingError as error:
            not_tried["stage"] = f"not tried: {error}"
        return cls(program, opened.specs(), not_tried)

    @property
    def choices(self) -> Choices:
        staged = "stage" not in self.not_tried
        return Choices(staged, context=False, remats=_REMATS, arrays=self.specs)

    def of_model(self, candidate: Candidate) -> Candidate:
        """A candidate with the model in place of the native one of its sizes."""
        found = candidate.program
        model = replace(self.program.model, remat=found.model.remat)
        return replace(candidate, program=replace(found, model=model))
