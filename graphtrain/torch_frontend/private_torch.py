"""Private interfaces of PyTorch, torchax and transformers that this package uses, one each.

None of them is promised to stay. They were tried with torch 2.13.0, torchax 0.0.14.dev20261026 and
transformers 5.24.0; pyproject.toml pins the first two. test_private_torch.py in
tests/extras/torch_models calls each one and says what to do when it breaks.
graphtrain/torch_xla/recorder.py is the one file for PyTorch/XLA: it runs without this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import jax
import torch

# Fake tensors and their errors have no public module.
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.utils import stateless
from torchax.tensor import Tensor
from torchax.view import View, ViewInfo

__all__ = [
    "DataDependentOutputException",
    "FakeTensorMode",
    "accepts_attention",
    "accepts_experts",
    "build_causal_model",
    "causal_model_class",
    "environment_of",
    "export_joint",
    "has_default_gate",
    "image_text_class",
    "is_operator",
    "is_traced",
    "reparametrize",
    "replacing_truncated_normal",
    "set_array",
    "stop_slice_gradient",
    "storage_id",
    "supports_sdpa",
    "tied_weights",
    "writes",
]


def reparametrize(
    module: torch.nn.Module, state: Mapping[str, torch.Tensor]
) -> AbstractContextManager[Any]:
    """Return a context in which a module has these parameters and buffers.

    torch.func.functional_call does this for one call of the module itself; models are also called
    by their methods.
    """
    return stateless._reparametrize_module(module, dict(state), tie_weights=True, strict=False)


def replacing_truncated_normal(draw: Callable[..., torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which torch.nn.init.trunc_normal_ draws by another function.

    References to trunc_normal_ that modules hold by import call it too.

    Args:
        draw: fills a tensor, given it, the mean, the standard deviation and both bounds.
    """
    return mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", draw)


def writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors share while they share storage, fake tensors too."""
    return tensor.untyped_storage()._cdata


def export_joint(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], decompositions: Mapping[Any, Any]
) -> Any:
    """Return the graph of forward and backward of a function; torch.export has only the first."""
    from torch._functorch.aot_autograd import aot_export_joint_simple

    return aot_export_joint_simple(
        function, tuple(inputs), trace_joint=True, decompositions=dict(decompositions)
    )


def is_operator(target: Any) -> bool:
    """Return whether the target of a graph's node is an operator of torch.ops, with tags."""
    return isinstance(target, torch._ops.OpOverload)


# --- torchax --------------------------------------------------------------------------------------


def environment_of(tensor: Any) -> Any:
    """Return the environment that a tensor of torchax was made in."""
    return tensor._env


def is_traced(value: Any) -> bool:
    """Return whether a value is a tensor of torchax: one with an array, or a slice of one.

    torchax returns a View, which is no torchax Tensor, from indexing by slices, numbers or None.
    """
    return isinstance(value, Tensor | View)


class _StopGradient(ViewInfo):
    """A view of a whole tensor: writes pass through it, gradients do not."""

    def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(jax_array)

    def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
        return new_value

    def calculate_output_shape(self, source: jax.Array) -> list[int]:
        return list(source.shape)


def stop_slice_gradient(value: Any) -> Any:
    """Return a slice of a tensor of torchax without its gradient; other values as they are."""
    return value.create_sub_view(_StopGradient()) if isinstance(value, View) else value


def set_array(tensor: Any, array: Any) -> None:
    """Replace the JAX array of a tensor of torchax, in place."""
    tensor._elem = array


# --- transformers ---------------------------------------------------------------------------------


def causal_model_class(config: Any) -> type | None:
    """Return the class of the causal language model of a configuration; None if there is none.

    It is the class that AutoModelForCausalLM builds. The language model of some larger models, such
    as Emu3, is only found by its name, which its own config.json contains.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes: Any = transformers.AutoModelForCausalLM._model_mapping
    if (kind := classes.get(type(config), None)) is not None:
        return kind
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()).intersection(
        config.architectures or ()
    )
    kinds = (getattr(transformers, name) for name in sorted(causal))
    return next((kind for kind in kinds if kind.config_class is type(config)), None)


def image_text_class(config: Any) -> type | None:
    """Return the class of the model of text and images of a configuration; None if none."""
    import transformers

    classes: Any = transformers.AutoModelForImageTextToText._model_mapping
    return classes.get(type(config), None)


def build_causal_model(kind: Any, config: Any, options: Mapping[str, Any]) -> torch.nn.Module:
    """Build a model of the class that `causal_model_class` returns.

    AutoModelForCausalLM takes the text part of a configuration, where the class needs only that.
    """
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM._model_mapping
    if type(config) in classes:
        return AutoModelForCausalLM.from_config(config, **options)
    return kind._from_config(config, **options)


def accepts_attention(kind: Any) -> bool:
    """Return whether a model class can call a registered attention implementation."""
    return kind._can_set_attn_implementation()


def accepts_experts(kind: Any) -> bool:
    """Return whether a model class calls an implementation of experts that can be chosen."""
    return kind._can_set_experts_implementation()


def supports_sdpa(kind: Any) -> bool:
    """Return whether a model class computes attention as scaled_dot_product_attention does."""
    return kind._supports_sdpa


def tied_weights(model: Any) -> dict[str, str]:
    """Return the names of a model's tied weights, with the names that folders have for them."""
    return dict(model._tied_weights_keys or {})


def has_default_gate(experts: Any) -> bool:
    """Return whether a module of experts gates as transformers does by default."""
    from transformers.integrations import moe

    return type(experts)._apply_gate is moe._default_apply_gate
