"""Resolution of a program: the target, mesh, rules and pipeline stages that its settings name."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from graphtrain.config.loss_positions import check_loss_chunk
from graphtrain.config.phase_settings import without_phases
from graphtrain.config.schema import (
    Adapter,
    Batch,
    Loss,
    Model,
    Optimizer,
    Phase,
    PipelineSettings,
    Program,
    check_pipeline,
    is_imported,
)
from graphtrain.config.tower import Tower
from graphtrain.errors import PlanError
from lowering.machine.target import Target
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.pipeline import Stages
from sharding_rules.rules import Rules


@dataclass(frozen=True)
class ResolvedProgram:
    """A program and what the names in its settings stand for.

    Its settings are those after the last phase; `phases.training_phases` returns the others.

    A command makes it once and hands it down, also to worker processes. A rule file that is edited
    meanwhile therefore changes nothing: the rules of a graph are those that its key digests.
    """

    settings: Program
    target: Target
    mesh: MeshShape  # with the size of the axis "rest"
    rules: Rules
    stages: Stages | None  # None without a pipeline
    phases: tuple[Phase, ...] = ()  # of a run, before the part with these settings
    tower: Tower | None = None  # of an estimate, beside the native model of a language model
    stands_for_imported: bool = False  # of an estimate, whether the native model does
    layers_outside: int = 0  # of an estimate, imported layers that are not in the stages
    computed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs, without what this one has computed."""
        return vars(self) | {"computed": {}}

    @property
    def run_settings(self) -> Program:
        """The settings of the entire run, with its phases."""
        return replace(self.settings, phase=self.phases) if self.phases else self.settings

    @property
    def model(self) -> Model:
        return self.settings.model

    @property
    def batch(self) -> Batch:
        return self.settings.batch

    @property
    def optimizer(self) -> Optimizer:
        return self.settings.optimizer

    @property
    def loss(self) -> Loss:
        return self.settings.loss

    @property
    def pipeline(self) -> PipelineSettings:
        return self.settings.pipeline

    @property
    def adapter(self) -> Adapter | None:
        return self.settings.adapter

    def with_settings(self, settings: Program) -> "ResolvedProgram":
        """Return a program with other settings, but the same target, mesh and rules.

        Raises:
            ShardingError: as resolve.
        """
        current = self.settings
        names = settings.target, settings.mesh, settings.rules
        assert names == (current.target, current.mesh, current.rules), "use resolve()"
        return replace(self, settings=settings, stages=_stages(settings, self.mesh, self.rules))


def resolve(
    program: Program, load_rules: Callable[[Sequence[str]], Rules] = Rules.load
) -> ResolvedProgram:
    """Resolve the names in a program's settings; reads the files of its rules.

    Args:
        program: settings.
        load_rules: returns the rules of some names; a search, which resolves thousands of programs,
            reads each of them once.

    Raises:
        LoweringError: the target is unknown.
        ShardingError: the rules are unknown, the mesh does not fill the target, the layers or
            microbatches cannot be divided among the stages, the rules have no stages, or a pipeline
            cannot use loss.chunk.
    """
    target = Target.parse(program.target)
    mesh = MeshShape.resolve(asdict(program.mesh), target.devices)
    rules = load_rules(program.rules)
    settings = without_phases(program)
    stages = _stages(settings, mesh, rules)
    return ResolvedProgram(settings, target, mesh, rules, stages, program.phases)


def _stages(program: Program, mesh: MeshShape, rules: Rules) -> Stages | None:
    """Return the assignment of layers to pipeline stages, or None without a pipeline."""
    stages = mesh.axes.get("stage", 1)
    if stages == 1:
        return None
    if "stage" not in rules.activations.get("stages", ()):
        raise ShardingError(
            f"mesh.stage = {stages}, but the rules do not divide layers among stages; "
            'add "pipeline" to program.rules, or use another axis'
        )
    divided = check_pipeline(program, stages)
    check_loss_chunk(program, mesh, rules)
    return divided


def layer_rows(program: ResolvedProgram) -> tuple[int | None, ...]:
    """Return the layer in each row of a run's stacked arrays; None for a padding row of a stage.

    Raises:
        PlanError: the model is imported from PyTorch, whose layers are not stacked this way.
    """
    if is_imported(program.model):
        raise PlanError(
            "this operation supports only the native decoder, not model.torch or model.hf; "
            "a run can resume their checkpoints on any mesh without it"
        )
    stages = program.stages
    return tuple(range(program.model.layers)) if stages is None else stages.rows
