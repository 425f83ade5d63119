"""Engine for the weights of a run that trains: its samples and its scores on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphtrain.cache import Cache
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.names import ServingPurpose, graphs_for
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.serving.engine import CompiledEngine
from graphtrain.weights.resident import relaid_parameters
from graphtrain.weights.sources import WeightSource
from lowering.trees import Tree


class TrainingEngine:
    """Compiled programs that generate with trained weights. Nothing is kept on the devices.

    Args:
        program: The program that is trained.
        base: Weights that its adapter belongs to.
        cache: Cache of compiled programs.
        purpose: What the programs are for.
        compile_hint: What compiles missing programs, for the error message.

    Raises:
        MissingProgram: a program is not compiled.
    """

    def __init__(
        self,
        program: ResolvedProgram,
        base: WeightSource | None,
        cache: Cache,
        purpose: ServingPurpose,
        compile_hint: str,
    ) -> None:
        self._trained, self._base = program, base
        self._program, names = graphs_for(program, purpose)
        self.graphs = LoadedPrograms(self._program, cache, names, compile_hint)

    @property
    def context_length(self) -> int:
        return self._program.batch.seq_len

    @contextmanager
    def open(self, parameters: Tree, step: int, vocab: int) -> Iterator[CompiledEngine]:
        """Yield an engine; its weights and its KV cache are freed after the block.

        Args:
            parameters: Trained parameters, on the devices.
            step: Number of completed steps.
            vocab: Number of tokens of the tokenizer; others are not generated.
        """
        described = self.graphs["serve_init"].inputs("parameters")
        engine = CompiledEngine(
            self._program,
            self.graphs,
            relaid_parameters(parameters, self._trained, self._base, self._program, described),
            weights_name=f"step {step}",
            vocab=vocab,
        )
        try:
            yield engine
        finally:
            engine.close()  # whatever still refers to it, such as the traceback of an error
