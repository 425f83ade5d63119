"""Classify the arrays that a collective moves: weights, gradients, activations or scalars."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from graphtrain.models.matrices import MUON_SCOPE, SOAP_SCOPE, is_hidden_matrix
from graphtrain.planning.scopes import Scope, scopes
from lowering.hlo.collectives import Collective
from lowering.tracing.gradient_scopes import AFTER_TICKS, BESIDE_TICK
from sharding_rules.plan import Plan
from sharding_rules.rules import Rules

Kind = Literal[
    "weights",
    "gradients",
    "updated weights",
    "matrices of Muon",
    "matrices of SOAP",
    "activations",
    "scalars",
]
_OF_OPTIMIZERS: dict[str, Kind] = {MUON_SCOPE: "matrices of Muon", SOAP_SCOPE: "matrices of SOAP"}

PARAMETERS, FROZEN = "state/parameters/", "frozen/"


@dataclass(frozen=True)
class MovedArrays:
    """The arrays that a collective moves."""

    kind: Kind
    paths: tuple[str, ...]  # of the parameters that are moved, or whose gradients are
    scopes: tuple[Scope, ...]  # operations that the collective belongs to

    @property
    def names(self) -> tuple[str, ...]:
        """Names for messages: paths of parameters, name scopes of activations."""
        if self.paths:
            return tuple(path.removeprefix(PARAMETERS) for path in self.paths)
        named = ("/".join(scope.names) or scope.operation for scope in self.scopes)
        return tuple(dict.fromkeys(named))

    def __str__(self) -> str:
        first, *remaining = self.names or ("an unnamed array",)
        suffix = f" and {len(remaining)} more" if remaining else ""
        return f"{first}{suffix}"


class ParameterIndex:
    """Index of the parameters of a plan, by shape and name."""

    def __init__(self, plan: Plan, rules: Rules) -> None:
        self.plan = plan
        self.rules = rules
        layouts = plan.layouts.items()
        self.paths = [path for path, layout in layouts if path.startswith((PARAMETERS, FROZEN))]
        self._by_shape: dict[tuple[int, ...], list[str]] = {}
        for path in self.paths:
            if path.startswith(FROZEN):
                continue  # no gradients
            for shape in self._shapes(path):
                self._by_shape.setdefault(shape, []).append(path)

    def classify(self, collective: Collective) -> MovedArrays:
        """Classify the arrays that a collective moves."""
        name_scopes = scopes(collective.scope)
        for scope, kind in _OF_OPTIMIZERS.items():
            if f"/{scope}/" in collective.scope:
                return MovedArrays(kind, self._hidden_matrices(), name_scopes)
        weights = tuple(path for path in collective.arrays if path in self.plan.layouts)
        weights = tuple(path for path in weights if path.startswith((PARAMETERS, FROZEN)))
        if weights:
            return MovedArrays("weights", weights, name_scopes)
        shapes = [shape for shape in collective.sizes if math.prod(shape) > 1]
        if not shapes:
            return MovedArrays("scalars", (), name_scopes)
        if any(f"/{scope}/" in collective.scope for scope in (BESIDE_TICK, AFTER_TICKS)):
            # Some rows of a stage: their number is of no parameter.
            of_rows = [self._by_shape.get(_key(shape[1:])) for shape in shapes]
            return MovedArrays("gradients", self._named(name_scopes, of_rows), name_scopes)
        matching_paths = [self._by_shape.get(_key(shape)) for shape in shapes]
        matches = sum(map(bool, matching_paths))
        mostly_unmatched = 2 * matches <= len(shapes)  # some of several may be stacked by stage
        passes_on = collective.op == "collective-permute" and not collective.decomposed_from
        if mostly_unmatched or passes_on:
            return MovedArrays("activations", (), name_scopes)
        phases = {scope.phase for scope in name_scopes}
        einsums = [scope for scope in name_scopes if scope.equation]
        of_weights = [scope for scope in einsums if _is_of_weights(scope)]
        if phases <= {"update"} and collective.op == "all-gather":
            return MovedArrays(
                "updated weights", self._named(name_scopes, matching_paths), name_scopes
            )
        if phases != {"forward"} and len(of_weights) * 2 >= len(einsums):
            return MovedArrays("gradients", self._named(name_scopes, matching_paths), name_scopes)
        return MovedArrays("activations", (), name_scopes)

    def _hidden_matrices(self) -> tuple[str, ...]:
        layouts = self.plan.layouts
        trained = (path for path in self.paths if path.startswith(PARAMETERS))
        return tuple(path for path in trained if is_hidden_matrix(layouts[path].spec))

    def named(self, name: str) -> tuple[str, ...]:
        """Return the paths of parameters with this name as a component."""
        return tuple(path for path in self.paths if name in path.split("/"))

    def _named(
        self, name_scopes: tuple[Scope, ...], matching_paths: list[list[str] | None]
    ) -> tuple[str, ...]:
        """Return the parameters with a moved shape; if scopes name some of them, only those."""
        possible = dict.fromkeys(path for paths in matching_paths for path in paths or ())
        named = [path for path in possible if any(_names(scope, path) for scope in name_scopes)]
        return tuple(named or possible)

    def _shapes(self, path: str) -> set[tuple[int, ...]]:
        """Return all shapes of a parameter's shards, for every subset of its mesh axes.

        Both the stack of layers and a single layer are included.
        """
        spec = self.plan.layouts[path].spec
        tables = [
            self.rules.table_for(role, path) for role in ("parameter", "gradient", "optimizer")
        ]
        sizes = []
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            names = {name for table in tables for name in (table.get(axis, ()) if axis else ())}
            shard_counts = (
                self.plan.mesh.size(subset)
                for subset_size in range(len(names) + 1)
                for subset in itertools.combinations(sorted(names), subset_size)
            )
            possible = {
                size // shard_count for shard_count in shard_counts if size % shard_count == 0
            }
            sizes.append(possible | ({1} if axis in ("layers", "virtual_stages") else set()))
        return {_key(shape) for shape in itertools.product(*sizes)}


def _is_of_weights(scope: Scope) -> bool:
    """Return whether an einsum of the backward pass contracts the batch: a weight gradient."""
    return scope.phase == "backward" and "b" not in (scope.equation or ("", "", "b"))[2]


def _names(scope: Scope, path: str) -> bool:
    """Return whether the names of a scope are components of a path, in order.

    "norm" matches any "..._norm", and "up+gate" matches both "up" and "gate".
    """
    components = iter(path.split("/"))

    def has_component(name: str) -> bool:
        return any(
            f"_{component}".endswith(f"_{alternative}")
            for component in components
            for alternative in name.split("+")
        )

    return bool(scope.names) and all(has_component(name) for name in scope.names)


def _key(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a key without order and sizes of 1, since compilers transpose and squeeze arrays."""
    return tuple(sorted(size for size in shape if size > 1))
