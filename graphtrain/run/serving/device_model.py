"""Weights and KV cache of compiled programs on their devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

import lowering
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.errors import TrainingError
from graphtrain.graphs.names import ADAPTER_RANKS
from graphtrain.models.attention.cache_layout import cache_layout
from graphtrain.models.lora.trainable import ADAPTERS
from graphtrain.run.programs import LoadedPrograms
from lowering.trees import Tree, flatten

if TYPE_CHECKING:
    from graphtrain.weights.named_adapters import NamedAdapter


class DeviceModel:
    """A program that generates: its compiled graphs, its weights, and the state of its slots.

    Args:
        program: The program that generates.
        graphs: Its compiled graphs.
        adapters: LoRA adapters beside the weights, for which the program has room.
    """

    def __init__(
        self, program: ResolvedProgram, graphs: LoadedPrograms, adapters: Sequence[NamedAdapter]
    ) -> None:
        self.program, self.graphs, self._adapters = program, graphs, adapters
        self._backend = lowering.backend(program.target)
        self.adapter_ranks: dict[str, tuple[int, int]] = {}  # begin and end of each adapter's
        if adapters:
            from graphtrain.weights.named_adapters import rank_intervals

            self.adapter_ranks = rank_intervals(adapters)
        self.weights: Tree
        self.state: Tree
        self.weights_name = ""

    def load(self, parameters: Tree, weights_name: str) -> None:
        """Make the weights, with the factors of the adapters, and an empty state.

        Args:
            parameters: Parameters, as `serve_init` takes them.
            weights_name: What the weights are, for error messages.
        """
        graph, factors = self.graphs["serve_init"], []
        with self.forbid_tracing():
            if self._takes_ranks:
                from graphtrain.run.serving.adapters import load_adapters

                described = graph.inputs(ADAPTERS)
                factors = [load_adapters(self._adapters, self.program, described)]
            outputs = graph(parameters, *factors)
        self.weights, self.state = outputs["weights"], outputs["state"]
        self.weights_name = weights_name

    def hold(self, weights: Tree, weights_name: str) -> None:
        """Take weights as `serve_init` returns them, and make an empty state."""
        self.weights, self.weights_name = weights, weights_name
        self.state = self.empty_state()  # as serve_init makes it

    def free(self) -> None:
        """Free the weights and the state."""
        nothing: Any = None
        self.weights = self.state = nothing

    def reset_state(self) -> None:
        """Replace the state by an empty one, which needs the memory of the one before."""
        nothing: Any = None
        self.state = nothing
        self.state = self.empty_state()

    def forbid_tracing(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is traced: programs are only loaded and run."""
        return self._backend.forbid_tracing()

    def to_devices(self, graph: Any, name: str, value: Any) -> Tree:
        """Place a value as a graph takes its input of this name."""
        return self._backend.to_devices(value, graph.inputs(name))

    def to_host(self, tree: Any) -> Any:
        """Return arrays on the devices as NumPy arrays."""
        import jax

        return jax.tree.map(np.asarray, self._backend.checkpoint_arrays(tree))

    def empty(self, described: Tree) -> Tree:
        """Return zeros of these shapes and shardings."""
        import jax

        zeros = jax.tree.map(lambda array: np.zeros(array.shape, array.dtype), described)
        return self._backend.to_devices(zeros, described)

    def empty_state(self) -> Tree:
        """Return the state of slots that hold nothing."""
        return self.empty(self.graphs.inputs(first_prefill_name(self.program), "state"))

    @property
    def _takes_ranks(self) -> bool:
        """Return whether the programs have adapters, loaded or not."""
        return self.program.settings.serve.total_adapter_rank > 0

    def ranks_of(self, adapter: str | None) -> dict[str, np.ndarray]:
        """Return the input that chooses an adapter, or the base; none if there are no adapters."""
        interval = (0, 0) if adapter is None else self.adapter_ranks[adapter]
        return {ADAPTER_RANKS: np.array(interval, np.int32)} if self._takes_ranks else {}

    def shortest_cache(self) -> int:
        """Return the number of positions of the layer that caches the fewest."""
        axis = cache_layout(self.program.target).key.index("k")
        caches = flatten(self.state["kv_cache"])
        return min(array.shape[axis] for path, array in caches.items() if path.endswith("/key"))

    def not_finite(self, adapter: str | None = None) -> TrainingError:
        """Return the error for logits that are not finite.

        Args:
            adapter: LoRA adapter that they are of; None: the weights alone.
        """
        dtype = self.program.model.dtype
        wider = "" if dtype == "float32" else ', or set program.serve.dtype = "float32"'
        if adapter is not None:
            return TrainingError(
                f"the adapter {adapter!r} on the weights of {self.weights_name} gives logits that "
                f"are not finite, so no token can be chosen; it overflows {dtype}, unless the "
                f"weights alone do too. Leave it out, or train it again with a lower rate{wider}"
            )
        return TrainingError(
            f"the weights of {self.weights_name} give logits that are not finite, so no token "
            f"can be chosen; they contain values that are not finite, or overflow {dtype}. "
            f"Use another checkpoint (--step), or convert the weights again{wider}"
        )


def first_prefill_name(program: ResolvedProgram) -> str:
    """Return the name of the smallest program that processes a part of a prompt."""
    return f"prefill_{program.settings.serve.prefill[0]}"


def padded(tokens: Sequence[int], size: int) -> np.ndarray:
    """Return tokens as int32, followed by zeros up to a size."""
    array = np.zeros(size, np.int32)
    array[: len(tokens)] = tokens
    return array
