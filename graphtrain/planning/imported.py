"""What a search does otherwise for a model of PyTorch, which is made but holds no weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from graphtrain.config.schema import Imported, Program
from graphtrain.estimates.arrays import state_arrays
from graphtrain.planning.candidates import Candidate, Choices
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError
from sharding_rules.plan import make_plan
from sharding_rules.rules import Rules

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
        from graphtrain.torch_models.model import open_model

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
        return Choices("stage" not in self.not_tried, context=False, remats=_REMATS)

    def take(self, ranked: Iterable[Candidate], count: int) -> Iterator[Candidate]:
        """The first candidates that split the model's own arrays, as programs of the model."""
        return islice(filter(None, map(self._taken, ranked)), count)

    def _taken(self, candidate: Candidate) -> Candidate | None:
        """A candidate with the model in place of the native one of its sizes."""
        found = candidate.program
        arrays = state_arrays(self.specs, found.optimizer)
        try:
            make_plan(arrays, Rules.load(found.rules), candidate.mesh)
        except ShardingError:
            return None
        model = replace(self.program.model, remat=found.model.remat)
        return replace(candidate, program=replace(found, model=model))
