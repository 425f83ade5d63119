"""Products of an imported model in fp8 or int8, chosen by the names of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import torch

from graphtrain.config.schema import Precision
from graphtrain.models.quantized_matmul import quantization_of, quantized_dot

# What modules of transformers are called, as program.precision.exclude calls it.
_NAMES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "gate": "router",
}


class ModuleNames:
    """Names of the modules that are being called, the innermost last."""

    def __init__(self) -> None:
        """Begin outside of all modules."""
        self._called: list[str] = []

    @contextmanager
    def follow(self, module: torch.nn.Module) -> Iterator[None]:
        """Follow the calls of a module and of those in it, if products are quantized inside."""
        if quantization_of() is None:
            yield
            return
        with ExitStack() as stack:
            for path, inner in module.named_modules():
                stack.callback(inner.register_forward_pre_hook(self._enter(path)).remove)
                stack.callback(inner.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, path: str) -> Any:
        def enter(_: Any, inputs: Any) -> None:
            self._called.append(path)

        return enter

    def _leave(self, _: Any, inputs: Any, output: Any) -> None:
        self._called.pop()

    def quantized(
        self, equation: str, x: jax.Array, weight: jax.Array, *, is_head: bool
    ) -> jax.Array | None:
        """Return a product with a weight in fp8 or int8; None if it is not quantized."""
        parts = (self._called[-1] if self._called else "").split(".")
        names = {_NAMES.get(part, part) for part in parts[-2:]} | ({"head"} if is_head else set())
        precision: Precision | None = quantization_of(*names)
        if precision is None:
            return None
        part, name = ("head", "head") if is_head else ("", *parts)[-2:]
        with jax.named_scope(part or "module"), jax.named_scope(name or "linear"):
            return quantized_dot(precision, equation, x, weight, x.dtype)
