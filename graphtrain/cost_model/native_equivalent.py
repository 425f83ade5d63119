"""Native equivalent of an imported PyTorch model, for estimates that need its sizes."""

from dataclasses import replace

from graphtrain.config.schema import FlaxModel, Model, Program, is_imported
from graphtrain.errors import PlanError


def sizes_unknown(program: Program) -> bool:
    """Return whether the model's sizes are unknown without building its PyTorch module.

    Callers that must not build the module, such as a run, check this first.
    """
    return _native(program, build=False) is None


def with_native_model(program: Program) -> Program:
    """Return the program with a native model of the same sizes, which estimates can use.

    Raises:
        PlanError: the sizes are not known.
    """
    native = _native(program)
    if native is None:
        raise PlanError(
            "this estimate needs the sizes of the model, and neither its configuration nor a token "
            "embedding shows them; use graphtrain compile, or inspect single arrays with --array"
        )
    if native is program.model:
        return program
    loss = replace(program.loss, chunk="none")  # a PyTorch module computes its own logits
    return replace(program, model=native, loss=loss)


def _native(program: Program, *, build: bool = True) -> Model | None:
    """Return the native model of the same sizes; None if they are unknown, or need `build`."""
    model = program.model
    if not is_imported(model):
        return model
    if isinstance(model, FlaxModel):
        return None
    from graphtrain.torch_frontend.native_equivalent import native_equivalent

    return native_equivalent(model) if build or model.hf is not None else None
