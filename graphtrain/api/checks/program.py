"""Problems of [program]: target, rules, mesh, pipeline, and sizes that the mesh does not divide."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from graphtrain.api.checks.problem import Problem
from graphtrain.api.checks.sizes import batch_size_problems, size_problems
from graphtrain.config.lines import KeyPath, line_numbers
from graphtrain.config.phases import training_phases
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Program, is_imported
from graphtrain.config.schema.phase import describe_phase
from lowering.errors import LoweringError
from lowering.machine.target import Target
from sharding_rules.documents import MAX_TOML_BYTES, DocumentError, read_text
from sharding_rules.errors import RuleProblem, RulesError, ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

_TARGET, _RULES = ("program", "target"), ("program", "rules")


def program_problems(program: Program) -> Iterator[Problem]:
    """Yield the problems of a program that need no tracing to be found."""
    problems = [*_target_problems(program), *_rule_problems(program.rules)]
    yield from problems
    if not problems:
        yield from _placement_problems(program)


def _target_problems(program: Program) -> Iterator[Problem]:
    try:
        target = Target.parse(program.target)
    except LoweringError as error:
        yield Problem("program", f"program.target: {error}", (_TARGET,))
        return
    sizes = asdict(program.mesh)
    try:
        MeshShape.resolve(sizes, target.devices, program.target)
    except ShardingError as error:
        named = [("program", "mesh", name) for name, size in sizes.items() if size != 1]
        yield Problem("program", f"program.{error}", (*named, _TARGET))


def _rule_problems(names: Sequence[str]) -> Iterator[Problem]:
    try:
        Rules.load(names)
    except RulesError as error:
        for problem in error.problems:
            yield _rule_problem(problem)


def _rule_problem(problem: RuleProblem) -> Problem:
    """Locate a mistake in a file of rules in that file, and others at program.rules."""
    if not problem.key or not problem.rules.endswith(".toml"):
        message = f"program.rules: {problem.rules!r}: {problem.reason}"
        return Problem("program", message, (_RULES,))
    line = _line(problem.rules, problem.key)
    location = f"{problem.rules}:{line}" if line else problem.rules
    return Problem("program", f"{'.'.join(problem.key)}: {problem.reason}", location=location)


def _line(file: str, key: KeyPath) -> int | None:
    try:
        return line_numbers(read_text(Path(file), MAX_TOML_BYTES)).get(key)
    except (OSError, DocumentError):  # it was readable a moment ago
        return None


def _placement_problems(program: Program) -> Iterator[Problem]:
    """Yield the problems of a program whose target, mesh and rules are each valid."""
    try:
        resolved = resolve(program)
    except ShardingError as error:  # layers, microbatches or positions over the stages
        yield Problem("program", f"program: {error}")
        return
    found = [*size_problems(resolved), *_phase_problems(resolved)]
    yield from found
    if not found and not is_imported(program.model):
        for phase in training_phases(resolved):
            yield from _remaining_problems(phase.program)


def _phase_problems(resolved: ResolvedProgram) -> Iterator[Problem]:
    """Yield each batch or sequence of a phase that the mesh does not divide, at its own line."""
    *phases, _ = training_phases(resolved)
    for index, (phase, settings) in enumerate(zip(phases, resolved.phases, strict=True)):
        table = ("program", "phase", str(index))
        for problem in batch_size_problems(phase.program):
            own = [(*table, path[-1]) for path in problem.settings if path[1] == "batch"]
            message = f"{describe_phase(index + 1, settings)}: {problem.message}"
            yield Problem("program", message, (*own, table, *problem.settings))


def _remaining_problems(resolved: ResolvedProgram) -> Iterator[Problem]:
    """Yield what the arithmetic of plans refuses, for a native model."""
    from graphtrain.cost_model.weights import shard_weights
    from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
    from graphtrain.models.chunk_size import loss_chunk
    from graphtrain.models.compute_dtype import check_compute_dtype
    from graphtrain.models.lora.trainable import served_adapter_arrays
    from graphtrain.models.optimizer_support import check_optimizer

    def serve_adapters(resolved: ResolvedProgram) -> object:
        return served_adapter_arrays(resolved.settings)

    checks = (
        check_compute_dtype,
        check_optimizer,
        shard_weights,
        step_uses_flash_kernel,
        loss_chunk,
        serve_adapters,
    )
    for check in checks:
        try:
            check(resolved)
        except (ShardingError, LoweringError) as error:
            yield Problem("program", str(error))
