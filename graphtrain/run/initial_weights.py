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
from lowering.trees import Tree

if TYPE_CHECKING:
    from graphtrain.weights.peft import PeftAdapter
    from graphtrain.weights.sources import WeightSource
    from graphtrain.weights.torch_modules import HuggingFaceWeights


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights, opened and checked before anything is loaded onto a device."""

    program: ResolvedProgram
    weights: WeightSource | HuggingFaceWeights
    adapter: PeftAdapter | None  # initial LoRA adapter, from run.init_adapter_from

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

        weights = _as_source(weights)
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
            record_base(_as_source(self.weights), directory)

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

        weights = _as_source(self.weights)
        return load_trainable_parameters(
            weights, self.adapter, self.program, array_specs, self._fill, init_parameters
        )

    @property
    def source(self) -> WeightSource:
        """Return the weights that an adapter belongs to."""
        return _as_source(self.weights)

    def frozen(self, described: Tree) -> Tree:
        """Return the frozen weights, on the devices.

        Args:
            described: Shapes, dtypes and shardings.
        """
        from graphtrain.weights.frozen import load_frozen_parameters

        return load_frozen_parameters(_as_source(self.weights), self.program, described, self._fill)

    @property
    def _fill(self):
        return lowering.backend(self.program.target).from_shards


def _as_source(weights: WeightSource | HuggingFaceWeights) -> WeightSource:
    """Narrow the type: the configuration refuses frozen weights of an imported model."""
    from graphtrain.weights.torch_modules import HuggingFaceWeights

    assert not isinstance(weights, HuggingFaceWeights)
    return weights
