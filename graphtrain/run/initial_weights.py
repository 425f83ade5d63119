"""Initial weights of a run: the trained parameters, and frozen weights if there are any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lowering
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.models.optimizer_state import copies_of_weights
from lowering.trees import Tree

if TYPE_CHECKING:
    from graphtrain.weights.imported_folder import HuggingFaceWeights
    from graphtrain.weights.imported_peft import ImportedPeftAdapter
    from graphtrain.weights.peft_import import PeftAdapter
    from graphtrain.weights.sources import WeightSource


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights, opened and checked before anything is loaded onto a device."""

    program: ResolvedProgram
    weights: WeightSource | HuggingFaceWeights
    # initial LoRA adapter, from run.init_adapter_from
    adapter: PeftAdapter | ImportedPeftAdapter | None

    @classmethod
    def open(cls, program: ResolvedProgram, run: Run, *, resuming: bool) -> InitialWeights | None:
        """Open run.init_from and run.init_adapter_from.

        Args:
            program: the program.
            run: settings of the run.
            resuming: whether the run resumes from a checkpoint.

        Returns:
            The initial weights; None if the run starts from random weights, or if it resumes and
            has no frozen weights.

        Raises:
            WeightsError: the weights are incomplete or of another model, or, when resuming, not
                those that the run started from.
        """
        keeps = has_frozen_weights(program.settings)
        if run.init_from is None or (resuming and not keeps):
            return None
        from graphtrain.weights.initial import open_initial_weights

        weights = open_initial_weights(program.model, run)
        assert weights is not None
        if not keeps:
            return cls(program, weights, None)
        from graphtrain.weights.base import verify_adapter_settings, verify_base
        from graphtrain.weights.frozen import open_adapter

        if resuming:
            verify_adapter_settings(program.adapter, Path(run.directory))
            verify_base(weights, Path(run.directory))
        adapter = None if resuming else open_adapter(program.settings, run, weights)
        return cls(program, weights, adapter)

    def save_run_files(self, directory: Path) -> None:
        """Write the files into a new run directory that exporting and resuming it need.

        These are the Hugging Face files of the weights and, with frozen weights, the path and
        digests of the base weights.
        """
        from graphtrain.weights.base import record_base
        from graphtrain.weights.initial import copy_hf_files_to_run

        with write_errors(directory):
            copy_hf_files_to_run(self.weights, directory)
        if has_frozen_weights(self.program.settings):
            record_base(self.weights, directory)

    def parameters(self, array_specs: Tree, init_parameters: Tree | None = None) -> Tree:
        """Return the trained parameters, on the devices.

        Args:
            array_specs: Shapes, dtypes and shardings.
            init_parameters: Parameters from the `init` graph, for new adapters; without it, they
            are zeros.
        """
        if self.program.adapter is None:
            from graphtrain.weights.initial import load_initial_parameters

            return load_initial_parameters(self.weights, self.program, array_specs, self._fill)
        from graphtrain.weights.frozen import load_trainable_parameters

        return load_trainable_parameters(
            self.weights, self.adapter, self.program, array_specs, self._fill, init_parameters
        )

    @property
    def source(self) -> WeightSource:
        """Return the weights that the adapter of a native model belongs to."""
        from graphtrain.weights.imported_folder import HuggingFaceWeights

        assert not isinstance(self.weights, HuggingFaceWeights)
        return self.weights

    def frozen(self, described: Tree, trained: Tree) -> Tree:
        """Return the frozen weights, on the devices.

        Args:
            described: Shapes, dtypes and shardings.
            trained: Those of the trained parameters, which the same folder may contain.
        """
        from graphtrain.weights.frozen import load_frozen_parameters

        return load_frozen_parameters(self.weights, self.program, described, self._fill, trained)

    @property
    def _fill(self):
        return lowering.backend(self.program.target).from_shards


def load_initial_weights(initial_weights: InitialWeights, described: Tree, state: Tree) -> Tree:
    """Return the state with its random weights replaced by the initial weights.

    The random weights are freed first, to limit the peak memory.

    Args:
        initial_weights: the initial weights.
        described: the state as an executable's inputs() describes it.
        state: new state, on the devices.
    """
    other_state = {name: tree for name, tree in state.items() if name != "parameters"}
    # New LoRA adapters keep their random initialization.
    new = state["parameters"] if initial_weights.program.adapter is not None else None
    state.clear()
    parameters = initial_weights.parameters(described["parameters"], new)
    for path in copies_of_weights(initial_weights.program.optimizer):
        _load_copy(initial_weights, path, other_state, described)
    return other_state | {"parameters": parameters}


def _load_copy(initial_weights: InitialWeights, path: str, state: Tree, described: Tree) -> None:
    """Replace a copy of the random weights, in the optimizer state, by the initial weights."""
    *parents, name = path.split("/")
    arrays, specs = state["optimizer"], described["optimizer"]
    for parent in parents:
        arrays, specs = arrays[parent], specs[parent]
    new = arrays[name] if initial_weights.program.adapter is not None else None
    arrays[name] = None  # frees the random weights
    arrays[name] = initial_weights.parameters(specs[name], new)
