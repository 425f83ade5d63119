"""Find the sharding rule that requires a collective, if there is one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.models.updated_weights import UPDATE_SCOPE
from graphtrain.planning.moved import MovedArrays, ParameterIndex
from lowering.hlo.collectives import Collective
from lowering.tracing.gradient_scopes import BESIDE_TICK
from sharding_rules.rules import Rules, matches

# Array axes of tokens: a sum over one of them is a sum over tokens.
_TOKENS = ("batch", "seq", "residual", "q_seq", "kv_seq", "capacity")
# Array axes for the letters of the models' einsums; b and s are token axes.
_LETTERS = {
    "b": ("batch",),
    "c": ("capacity",),
    "e": ("embed",),
    "g": ("heads", "attention_heads"),
    "h": ("heads", "kv_heads", "attention_heads", "attention_kv_heads"),
    "k": ("kv_seq", "seq"),
    "m": ("mlp",),
    "q": ("q_seq", "seq"),
    "s": ("seq", "residual"),
    "v": ("vocab",),
    "x": ("experts",),
}
# Array axis that a part of the model sums over outside of einsums.
_INSIDE = {"embedding": "vocab", "head": "vocab", "loss": "vocab", "attention": "heads"}
_FEW = 1 << 16  # elements; a smaller sum over tokens that is not a gradient is a batch statistic


@dataclass(frozen=True)
class Reason:
    """A sharding rule and the strategy that contains it."""

    rule: str  # as in "parameters.embed = fsdp"
    strategy: str  # preset or file that contains the rule

    def __str__(self) -> str:
        return f"{self.rule} ({self.strategy})" if self.strategy else self.rule


class Reasons:
    """Lookup of the rules of a program that require a collective."""

    def __init__(self, program: ResolvedProgram, parameters: ParameterIndex) -> None:
        self.program = program
        self.parameters = parameters
        self.rules = parameters.rules
        self.mesh = parameters.plan.mesh
        self._strategies = {name: Rules.load((name,)) for name in program.settings.rules}

    def find(self, collective: Collective, moved: MovedArrays, mesh_axis: str) -> Reason | None:
        """Return why the collective crosses one of its mesh axes; None if no rule requires it."""
        op = collective.decomposed_from or collective.op
        if moved.kind == "weights":
            # TPU compilers gather small arrays with an all-reduce of zero-padded shards.
            return self._weights(moved, mesh_axis) if op in ("all-gather", "all-reduce") else None
        if op not in ("all-reduce", "reduce-scatter") and self._is_for_rows(moved, mesh_axis):
            table = self.parameters.named("embedding")
            return self._resting(table, mesh_axis) or self._tokens(mesh_axis)
        if moved.kind == "gradients":
            return self._gradients(collective, moved, mesh_axis, op)
        if moved.kind == "updated weights":
            return self._updated(collective, moved, mesh_axis)
        if moved.kind in ("matrices of Muon", "matrices of SOAP"):
            tables = "parameters", "optimizer"  # else its devices divide the work of replicas
            return self._resting(moved.paths, mesh_axis, tables) or self._tokens(mesh_axis)
        if moved.kind == "scalars":
            return self._tokens(mesh_axis) or self._resting(self.parameters.paths, mesh_axis)
        return self._activations(collective, moved, mesh_axis, op)

    def in_microbatches(self, collective: Collective) -> bool:
        """Return whether the collective is executed once per microbatch, not once per step."""
        if any(f"/{scope}/" in collective.scope for scope in (UPDATE_SCOPE, BESIDE_TICK)):
            return False  # its loop is over layers, or over ticks
        microbatches = self.program.batch.microbatches
        around = collective.scope.partition("jvp(")[0]  # without the loop over layers, inside jvp
        return collective.loops[:1] == (microbatches,) and "while/body" in around

    def keeps_whole(self, collective: Collective, moved: MovedArrays) -> bool:
        """Return whether gradients are all-reduced although every device uses only its shard."""
        return (
            moved.kind == "gradients"
            and collective.op == "all-reduce"
            and any(
                self._resting(moved.paths, axis, ("parameters", "gradients"))
                for axis in collective.axes
            )
        )

    def axes_of(self, moved: MovedArrays) -> tuple[str, ...]:
        """Return the array axes of the parameters that are moved."""
        layouts = (self.parameters.plan.layouts[path] for path in moved.paths)
        named = (axis for layout in layouts for axis in layout.spec.axes if axis)
        return tuple(dict.fromkeys(named))

    def _weights(self, moved: MovedArrays, mesh_axis: str) -> Reason | None:
        """Return the rule that shards stored weights over an axis over which they are gathered."""
        for path in moved.paths:
            layout = self.parameters.plan.layouts[path]
            for axis, names in zip(layout.spec.axes, layout.split, strict=True):
                in_use = self.rules.activations.get(axis or "", ())
                if axis and axis != "layers" and mesh_axis in names and mesh_axis not in in_use:
                    return self._rule("parameters", axis, mesh_axis, path)
        return None

    def _gradients(
        self, collective: Collective, moved: MovedArrays, mesh_axis: str, op: str
    ) -> Reason | None:
        """Return the rule for a gradient: a sum over axes of tokens, scattered to its sharding."""
        summed = self._tokens(mesh_axis)
        is_deferred = self.program.batch.gradient_reduction == "per_step" and self.in_microbatches(
            collective
        )
        if op == "all-gather":
            return None if collective.loops else self._updated(collective, moved, mesh_axis)
        if op not in ("all-reduce", "reduce-scatter") or (is_deferred and mesh_axis == "data"):
            return None
        if summed and op == "reduce-scatter":
            return self._resting(moved.paths, mesh_axis) or summed
        return summed or self._activation(("stages",), mesh_axis)

    def _updated(self, collective: Collective, moved: MovedArrays, mesh_axis: str) -> Reason | None:
        """Return the rule for gathering updated weights, once per step after the update."""
        if self.in_microbatches(collective):
            return None
        return self._resting(moved.paths, mesh_axis, ("optimizer", "gradients"))

    def _activations(
        self, collective: Collective, moved: MovedArrays, mesh_axis: str, op: str
    ) -> Reason | None:
        if stages := self._activation(("stages",), mesh_axis):
            return stages
        if op == "all-gather":
            return self._gathered(collective, mesh_axis)
        if op == "all-to-all":
            by_head = self._activation(("attention_heads", "attention_kv_heads"), mesh_axis)
            by_expert = self._activation(("experts",), mesh_axis)
            return by_expert or (by_head if mesh_axis in self._split("seq") else None)
        if op == "collective-permute":
            return self._activation(("kv_seq",), mesh_axis)
        if op == "reduce-scatter" and mesh_axis not in self._split("residual"):
            return None
        return self._summed(collective, moved, mesh_axis)

    def _summed(self, collective: Collective, moved: MovedArrays, mesh_axis: str) -> Reason | None:
        """Return the rule that splits a contracted array axis, whose partial sums are reduced."""
        einsums = [scope for scope in moved.scopes if scope.equation]
        for scope in einsums:
            axes = [axis for letter in scope.contracted for axis in _LETTERS.get(letter, ())]
            if reason := self._activation(axes, mesh_axis):
                return reason
        if einsums:
            return None
        names = {name for scope in moved.scopes for name in scope.names}
        inside = [_INSIDE[name] for name in _INSIDE if name in names]
        inside += [axis for axis in self.rules.activations if axis not in _TOKENS]
        elements = sum(math.prod(shape) for shape in collective.sizes)
        statistic = self._tokens(mesh_axis) if elements <= _FEW else None
        return self._activation(inside, mesh_axis) or statistic

    def _gathered(self, collective: Collective, mesh_axis: str) -> Reason | None:
        """Return the rule for gathering positions: of the residual stream, or tokens of experts."""
        dimension, sizes = collective.dimension or 0, collective.sizes[0]
        features = self._features()
        is_last = dimension == len(sizes) - 1
        if mesh_axis in self._split("residual") and mesh_axis not in self._split("seq"):
            of_features = is_last and sizes[dimension] * collective.devices in features
            return None if of_features else self._activation(("residual",), mesh_axis)
        if mesh_axis in self._split("seq"):
            if any(path.startswith("batch/") for path in collective.arrays):
                return self._activation(("kv_seq",), mesh_axis)  # reordering to ring order
            travels = ("kv_seq", "attention_heads")
            by_kernel = any(mesh_axis in self._split(axis) for axis in travels)
            return None if by_kernel else self._activation(("seq",), mesh_axis)
        return self._activation(("experts",), mesh_axis)

    def _features(self) -> set[int]:
        """Return the sizes of the model's feature axes, read from its parameters."""
        specs = (layout.spec for layout in self.parameters.plan.layouts.values())
        sized = (pair for spec in specs for pair in zip(spec.axes, spec.shape, strict=True))
        return {size for axis, size in sized if axis in ("embed", "mlp", "vocab")}

    def _is_for_rows(self, moved: MovedArrays, mesh_axis: str) -> bool:
        """Return whether tokens are gathered for the gradient of the embedding.

        Each device then adds up its own columns, which sends less than the gradient itself.
        """
        adds = any(scope.operation == "scatter-add" for scope in moved.scopes)
        return adds and self._tokens(mesh_axis) is not None

    def _split(self, axis: str) -> tuple[str, ...]:
        names = self.rules.activations.get(axis, ())
        return tuple(name for name in names if self.mesh.axes.get(name, 1) > 1)

    def _tokens(self, mesh_axis: str) -> Reason | None:
        return self._activation(_TOKENS, mesh_axis)

    def _activation(self, axes: Iterable[str], mesh_axis: str) -> Reason | None:
        for axis in axes:
            if mesh_axis in self._split(axis):
                return self._rule("activations", axis, mesh_axis)
        return None

    def _resting(
        self,
        paths: Iterable[str],
        mesh_axis: str,
        tables: tuple[str, ...] = ("parameters", "gradients", "optimizer"),
    ) -> Reason | None:
        """Return the rule that splits a parameter, its gradient or its moments over a mesh axis."""
        for path in paths:
            for axis in self.parameters.plan.layouts[path].spec.axes:
                for table in tables:
                    at_rest = getattr(self.rules, table)
                    if axis and mesh_axis in at_rest.get(axis, ()):
                        return self._rule(table, axis, mesh_axis, path)
        return None

    def _rule(self, table: str, axis: str, mesh_axis: str, path: str = "") -> Reason:
        for pattern, override in self.rules.arrays.items():
            if table != "activations" and axis in override and matches(path, pattern):
                return Reason(f"arrays {pattern!r}: {axis} = {mesh_axis}", "")
        names = [
            name
            for name, rules in self._strategies.items()
            if mesh_axis in getattr(rules, table).get(axis, ())
        ]
        return Reason(f"{table}.{axis} = {mesh_axis}", " + ".join(names))
