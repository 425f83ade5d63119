"""Dump of an imported model as eager PyTorch computes it: outputs of modules, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import TorchModel
from graphtrain.errors import DumpError
from graphtrain.graphs.names import KINDS
from graphtrain.run.dumps.files import ArrayEntry, DumpIndex
from graphtrain.weights.files import numpy_dtype_of
from graphtrain.weights.torch_arrays import as_numpy
from lowering.machine.extras import optional_import
from lowering.trees import Tree, flatten
from lowering.xla import distributed

if TYPE_CHECKING:
    import torch

_FORWARD, _BACKWARD, _GRADIENTS = KINDS


def check_eager(program: ResolvedProgram, steps: int) -> None:
    """Refuse a program whose training step eager PyTorch does not repeat here.

    Raises:
        DumpError: names the setting.
    """
    loss, batch = program.loss, program.batch
    refused = {
        "--steps (PyTorch takes no optimizer step; use 1)": steps > 1,
        "several processes": distributed.count() > 1,
        "pipeline parallelism (mesh.stage > 1)": program.stages is not None,
        "a model that is not imported (model.hf or model.torch)": not isinstance(
            program.model, TorchModel
        ),
        "batch.cross_document_attention = false": not batch.cross_document_attention,
        "program.model.images": isinstance(program.model, TorchModel) and program.model.images > 0,
        "loss.custom": loss.custom is not None,
        "loss.z_loss": bool(loss.z_loss),
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise DumpError(f"graphtrain dump --torch does not support {' and '.join(names)}")


def eager_step(
    program: ResolvedProgram, parameters: Tree, batch: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the arrays of one training step of an imported model in PyTorch, in float32.

    Args:
        program: the program.
        parameters: the model's parameters, on the host.
        batch: rows of the global batch.
    """
    with optional_import("graphtrain dump --torch"):
        import torch

        from graphtrain.torch_frontend.open_module import open_model
        from graphtrain.torch_frontend.parity import module_with_weights, unstack_weights
    model = program.model
    assert isinstance(model, TorchModel)
    module = module_with_weights(model)
    values = unstack_weights(open_model(model), flatten(parameters))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.tensor(values[name]))
    rows = {name: torch.tensor(array) for name, array in batch.items()}
    call = {"use_cache": False} if model.hf is not None else {}

    def loss() -> torch.Tensor:
        out = module(rows["tokens"].long(), **call)
        logits = getattr(out, "logits", out).float()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), rows["targets"].long(), reduction="none"
        )
        return (losses * rows["weights"]).sum() / rows["weights"].sum().clamp(min=1)

    return eager_arrays(module, loss, tuple(rows["tokens"].shape))


def eager_index(index: DumpIndex, arrays: Mapping[str, np.ndarray]) -> DumpIndex:
    """Return the index of a dump by PyTorch, for that of the compiled step."""
    entries = [
        ArrayEntry(name, list(array.shape), array.dtype.name, []) for name, array in arrays.items()
    ]
    versions = {name: version(name) for name in ("torch", "transformers")}
    return replace(
        index,
        target="PyTorch",
        mesh={},
        dtype="float32",
        summary=False,
        program="",
        versions=versions,
        arrays=entries,
    )


def eager_arrays(
    module: torch.nn.Module, loss: Callable[[], torch.Tensor], tokens: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return outputs of modules and the gradients with respect to them, in the order of execution.

    Args:
        module: the model, with its weights.
        loss: calls it and returns the objective.
        tokens: shape of the token ids, with which a recorded output begins.
    """
    import torch

    from graphtrain.torch_frontend.recorded_modules import is_activation, name_of_output

    kept: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: Any, inputs: Any, output: Any) -> None:
            first: Any = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(first, torch.Tensor) or not first.requires_grad:
                return
            if is_activation(tuple(first.shape), first.is_floating_point(), tokens):
                first.retain_grad()
                kept[name] = first

        return keep

    handles = [
        submodule.register_forward_hook(hook(name))
        for path, submodule in module.named_modules()
        if path and (name := name_of_output(path, submodule))
    ]
    try:
        objective = loss()
    finally:
        for handle in handles:
            handle.remove()
    objective.backward()
    forward = {f"{_FORWARD}/{name}": _array(name, tensor) for name, tensor in kept.items()}
    backward = {
        f"{_BACKWARD}/{name}": _array(name, tensor.grad)
        for name, tensor in reversed(kept.items())
        if tensor.grad is not None
    }
    gradients = {
        f"{_GRADIENTS}/{name.replace('.', '/')}": _array(name, parameter.grad)
        for name, parameter in reversed(list(module.named_parameters()))
        if parameter.grad is not None
    }
    return (
        forward | backward | gradients | {"metrics/loss": np.asarray(np.float32(objective.item()))}
    )


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    dtype = numpy_dtype_of(name, str(tensor.dtype).removeprefix("torch."))
    return as_numpy(tensor, dtype).copy()
