"""Initial weights of a run: the trained parameters, and frozen weights if there are any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lowering
from graphtrain.config.schema import Config, Program
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.run.metrics import writing
from lowering.machine.target import Target
from lowering.trees import Tree

if TYPE_CHECKING:
    from graphtrain.weights.peft import PeftAdapter
    from graphtrain.weights.sources import Source
    from graphtrain.weights.torch_modules import ModuleWeights


@dataclass(frozen=True)
class Beginning:
    """Initial weights, opened and checked before anything is loaded onto a device."""

    program: Program
    weights: Source | ModuleWeights
    adapter: PeftAdapter | None  # initial LoRA adapter, from run.initial_adapter

    @classmethod
    def open(cls, config: Config, *, resumes: bool) -> Beginning | None:
        """Open run.initial and run.initial_adapter.

        Args:
            config: Settings.
            resumes: Whether the run resumes from a checkpoint.

        Returns:
            The initial weights; None if the run starts from random weights, or if it resumes and
            has no frozen weights.

        Raises:
            WeightsError: the weights are incomplete or of another model, or, when resuming, not
                those that the run started from.
        """
        keeps = has_frozen_weights(config.program)
        if config.run.initial is None or (resumes and not keeps):
            return None
        from graphtrain.weights.start import open_initial

        weights = open_initial(config)
        assert weights is not None
        if not keeps:
            return cls(config.program, weights, None)
        from graphtrain.weights.base import check_adapter, check_base
        from graphtrain.weights.frozen import open_adapter

        weights = _native(weights)
        if resumes:
            check_adapter(config, Path(config.run.directory))
            check_base(weights, Path(config.run.directory))
        return cls(config.program, weights, None if resumes else open_adapter(config, weights))

    def keep(self, directory: Path) -> None:
        """Write the files into a new run directory that exporting and resuming it need.

        These are the Hugging Face files of the weights and, with frozen weights, the path and
        digests of the base weights.
        """
        from graphtrain.weights.base import keep_base
        from graphtrain.weights.start import keep_side

        with writing(directory):
            keep_side(self.weights, directory)
        if has_frozen_weights(self.program):
            keep_base(_native(self.weights), directory)

    def parameters(self, described: Tree, new: Tree | None = None) -> Tree:
        """Return the trained parameters, on the devices.

        Args:
            described: Shapes, dtypes and shardings.
            new: Parameters from the `init` graph, for new adapters; without it, they are zeros.
        """
        if self.program.adapter is None:
            from graphtrain.weights.start import start_parameters

            return start_parameters(self.weights, self.program, described, self._fill)
        from graphtrain.weights.frozen import trained_parameters

        weights = _native(self.weights)
        return trained_parameters(weights, self.adapter, self.program, described, self._fill, new)

    def frozen(self, described: Tree) -> Tree:
        """Return the frozen weights, on the devices.

        Args:
            described: Shapes, dtypes and shardings.
        """
        from graphtrain.weights.frozen import frozen_parameters

        return frozen_parameters(_native(self.weights), self.program, described, self._fill)

    @property
    def _fill(self):
        return lowering.backend(Target.parse(self.program.target)).fill


def _native(weights: Source | ModuleWeights) -> Source:
    """Narrow the type: the configuration refuses frozen weights of an imported model."""
    from graphtrain.weights.torch_modules import ModuleWeights

    assert not isinstance(weights, ModuleWeights)
    return weights
