"""The filler of a pipeline whose stages have unequal numbers of layers."""

from dataclasses import replace

from graphtrain.config.schema import Model, Program, is_imported
from graphtrain.errors import PlanError
from graphtrain.requests import stages_of


def hides_sizes(program: Program) -> bool:
    """Whether only the module of a program says its sizes, which a run does not make."""
    return is_imported(program.model) and (program.model.hf is None or _native(program) is None)


def estimable(program: Program) -> Program:
    """The program with a native model, of the sizes of its own, which is what estimates know.

    Raises:
        PlanError: they are not known.
    """
    native = _native(program)
    if native is None:
        raise PlanError(
            "this takes the sizes of the model, and it has no table of tokens that tells them; "
            "compile it with graphtrain compile, or see single arrays with --array"
        )
    if native is program.model:
        return program
    loss = replace(program.loss, chunk="whole")  # a module of PyTorch keeps its head to itself
    return replace(program, model=native, loss=loss)


def _native(program: Program) -> Model | None:
    if not is_imported(program.model):
        return program.model
    from graphtrain.torch_models.sizes import look_alike

    return look_alike(program.model)


def with_filler(program: Program) -> Program:
    """A program with as many layers as its stages hold rows: those of zeros take memory and time.

    Raises:
        PlanError: as estimable.
        ShardingError: layers or microbatches that the stages cannot take.
    """
    program = estimable(program)
    stages = stages_of(program)
    if stages is None:
        return program
    return replace(
        program,
        model=replace(program.model, layers=len(stages.rows)),
        pipeline=replace(program.pipeline, layers=None),
    )
