"""The executables of a program, from the cache, or why they are not there."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import lowering
from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.schema import Program
from graphtrain.errors import MissingProgram
from lowering.machine.target import Target


class Programs:
    """The compiled graphs of a program, each loaded when it is first used.

    All are found and checked at once, so that a missing one is known before the run begins; loading
    later lets the first compute while the next is loaded.
    """

    def __init__(self, program: Program, cache: Cache, names: Sequence[str], remedy: str) -> None:
        """Find the named graphs; nothing is traced.

        Args:
            remedy: the command that would compile them, for the error.

        Raises:
            MissingProgram: a graph was not compiled; says which ingredient of its key differs.
        """
        keys = request_keys(program, names)
        found = {name: cache.find(keys[name]) for name in names}
        missing = {name: keys[name] for name, artifact in found.items() if artifact is None}
        if missing:
            raise MissingProgram("\n".join([*_reasons(cache, missing), f"run: {remedy}"]))
        self.keys = {name: keys[name] for name in names}
        self._artifacts = found
        self._loaded: dict[str, Any] = {}
        self._target = Target.parse(program.target)

    def digests(self) -> dict[str, str]:
        """Of the executables found, before any is loaded."""
        return {
            name: hashlib.sha256(artifact.payload).hexdigest()
            for name, artifact in self._artifacts.items()
            if artifact is not None
        }

    def peak_bytes(self) -> int:
        """Most that training holds on a device at once, before it is loaded; 0: not known."""
        artifact = self._artifacts.get("train")
        return 0 if artifact is None else artifact.record.get("memory", {}).get("peak", 0)

    def __getitem__(self, name: str) -> Any:
        """The executable of a graph.

        Raises:
            LoweringError: it was compiled for another processor.
        """
        if name not in self._loaded:
            artifact = self._artifacts.pop(name)
            self._loaded[name] = lowering.backend(self._target).load(artifact, self._target)
        return self._loaded[name]


def _reasons(cache: Cache, missing: Mapping[str, CacheKey]) -> list[str]:
    """Why graphs are missing; what several have in common is said once."""
    explanations = cache.explain_all(missing)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, explanation in explanations.items():
        alike.setdefault(explanation.lines or (name,), []).append(name)
    return [
        f"no compiled {' and '.join(names)} step: {explanations[names[0]]}"
        for names in alike.values()
    ]
