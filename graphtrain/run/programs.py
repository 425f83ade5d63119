"""Loading of the executables of a program from the cache, with an explanation of misses."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import lowering
from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.errors import GraphtrainError, MissingProgram, UserError
from lowering.artifact import Artifact
from lowering.trees import Tree
from sharding_rules.mesh import MeshShape


class LoadedPrograms:
    """Compiled graphs of a program, each loaded on first use.

    All graphs are looked up and checked at construction, so that a missing one is reported before
    the run begins. Loading on use lets one graph compute while the next is loaded.
    """

    def __init__(
        self, program: ResolvedProgram, cache: Cache, names: Sequence[str], remedy: str
    ) -> None:
        """Look up the named graphs; nothing is traced.

        Args:
            program: the program.
            cache: Cache to look in.
            names: Names of graphs, for example "train".
            remedy: Command that compiles the graphs, for the error message.

        Raises:
            MissingProgram: a graph is not in the cache; reports which part of its key differs.
        """
        keys = request_keys(program, names)
        artifacts = {name: cache.get_by_request(keys[name]) for name in names}
        missing = {name: keys[name] for name, artifact in artifacts.items() if artifact is None}
        if missing:
            raise MissingProgram("\n".join([*_reasons(cache, missing), f"run: {remedy}"]))
        self.keys = {name: keys[name] for name in names}
        self._artifacts = artifacts
        # How long each graph took to compile; graphs whose record does not say it are left out.
        self.compile_seconds = {
            name: float(artifact.record["compile_seconds"])
            for name, artifact in artifacts.items()
            if artifact is not None and "compile_seconds" in artifact.record
        }
        self._loaded: dict[str, Any] = {}
        self._target = program.target

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each executable that is not loaded yet, by graph name."""
        return {
            name: hashlib.sha256(artifact.payload).hexdigest()
            for name, artifact in self._artifacts.items()
            if artifact is not None
        }

    def peak_bytes(self) -> int:
        """Return the peak memory of the train graph, in bytes per device; 0 if not recorded.

        Call it before the train graph is loaded.
        """
        artifact = self._artifacts.get("train")
        return 0 if artifact is None else artifact.record.get("memory", {}).get("peak", 0)

    def __getitem__(self, name: str) -> Any:
        """Return the executable of a graph, loaded on first use.

        Raises:
            LoweringError: the graph was compiled for another processor.
        """
        if name not in self._loaded:
            artifact = self._artifacts.pop(name)
            assert artifact is not None, f"{name} is loaded once"
            self._loaded[name] = self._load(name, artifact)
        return self._loaded[name]

    def is_loaded(self, name: str) -> bool:
        """Return whether the executable of a graph is loaded."""
        return name in self._loaded

    def inputs(self, graph: str, name: str) -> Tree:
        """Return shapes, dtypes and shardings of one input of a graph, without loading it."""
        from lowering.xla.executable import (
            described_inputs,  # JAX, after the programs are looked up
        )

        artifact = self._artifacts.get(graph)
        if artifact is None:  # it is loaded
            return self._loaded[graph].inputs(name)
        backend = lowering.backend(self._target)
        shape = MeshShape(artifact.record["mesh"])
        mesh = backend.make_mesh(shape, backend.devices(self._target))
        return described_inputs(artifact.record, mesh, name)

    def load_all(self) -> None:
        """Load every graph.

        Raises:
            LoweringError: a graph was compiled for another processor.
        """
        for name in self.keys:
            self[name]

    def _load(self, name: str, artifact: Artifact) -> Any:
        try:
            return lowering.backend(self._target).load(artifact, self._target)
        except UserError:
            raise
        except Exception as error:  # of XLA, whose digest of the payload was right
            raise GraphtrainError(
                f"the compiled {name} step cannot be loaded ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0][:300]}); is there enough memory? Otherwise "
                "compile it again, into another cache (--cache DIR)"
            ) from error


def _reasons(cache: Cache, missing: Mapping[str, CacheKey]) -> list[str]:
    """Return one line per reason why graphs are missing; graphs with the same reason share it."""
    explanations = cache.explain_all(missing)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, explanation in explanations.items():
        alike.setdefault(explanation.lines or (name,), []).append(name)
    return [f"no compiled {_listed(names)}: {explanations[names[0]]}" for names in alike.values()]


def _listed(names: Sequence[str]) -> str:
    """Return names of graphs in words: "train step", "init, train and evaluate steps"."""
    *most, last = names
    return f"{', '.join(most)} and {last} steps" if most else f"{last} step"
