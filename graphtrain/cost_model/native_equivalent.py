"""The native look-alike of a model of PyTorch, whose sizes estimates know."""

from dataclasses import replace

from graphtrain.config.schema import Model, Program, is_imported
from graphtrain.errors import PlanError


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
    from graphtrain.torch_frontend.sizes import look_alike

    return look_alike(program.model)
