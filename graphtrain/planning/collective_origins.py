"""Blame: explain every collective of a compiled program by a sharding rule, or flag it.

XLA inserts a collective wherever two shardings differ, and does not report why. This module traces
each to a line of the model, the arrays that it moves, and the rule that requires it. A collective
that no rule requires is flagged, with the annotation that would remove it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.communication_time import speed_of
from graphtrain.planning.moved import MovedArrays, ParameterIndex
from graphtrain.planning.reasons import Reason, Reasons
from lowering.hlo.collectives import Collective
from sharding_rules.plan import Plan

# Of the bytes that a step sends. An unexplained collective below it costs less than it is worth.
_SMALL_SHARE = 0.01
_VERBS = {
    "all-reduce": "summed",
    "all-gather": "gathered",
    "reduce-scatter": "summed and split",
    "all-to-all": "exchanged",
    "collective-permute": "permuted",
    "collective-broadcast": "broadcast",
}


@dataclass(frozen=True)
class CollectiveOrigin:
    """Origin of one collective of a compiled program."""

    collective: Collective
    array: str  # as in "layers/mlp/down"; for an activation, the name scope of its operation
    rule: str  # as in "parameters.embed = fsdp"; empty if no rule requires the collective
    strategy: str  # preset that contains the rule
    explained: bool
    explanation: str  # a sentence that names the rule, or why no rule is known
    seconds: float | None = None  # per step; None if the bandwidth is unknown


def explain_collectives(
    program: ResolvedProgram,
    plan: Plan,
    collectives: Sequence[Collective],
    *,
    annotations: Sequence[Mapping[str, Any]] = (),
    bytes_per_second: Mapping[str, float] | None = None,
) -> tuple[CollectiveOrigin, ...]:
    """Explain the collectives of a compiled training step, in order.

    Args:
        program: The compiled program.
        plan: Layouts of its arrays.
        collectives: Collectives read from the compiled program, or from its record.
        annotations: "annotations" of the record: axes and lines of constrain() calls.
        bytes_per_second: Bandwidth of one device along each mesh axis.
    """
    parameters = ParameterIndex(plan, program.rules)
    reasons = Reasons(program, parameters)
    speeds = bytes_per_second or {}

    def explain(collective: Collective) -> CollectiveOrigin:
        moved = parameters.classify(collective)
        reasons_by_axis = {axis: reasons.find(collective, moved, axis) for axis in collective.axes}
        known_reasons = list(dict.fromkeys(reason for reason in reasons_by_axis.values() if reason))
        step = _step_across_slices(collective, program)
        explained = bool(step) or all(reasons_by_axis.values())
        seconds = _seconds(collective, speeds, program)
        if step:
            why = step
        elif explained:
            why = _explanation(collective, moved, known_reasons, reasons)
        else:
            why = _why_unexplained(collective, moved, reasons_by_axis, reasons, annotations)
        sentence = (
            f"{_describe_traffic(collective, moved, reasons)}{_cost(collective, seconds)}: {why}"
        )
        return CollectiveOrigin(
            collective,
            str(moved),
            "; ".join(reason.rule for reason in known_reasons) if explained else "",
            " + ".join(dict.fromkeys(r.strategy for r in known_reasons if r.strategy))
            if explained
            else "",
            explained,
            sentence,
            seconds,
        )

    return tuple(explain(collective) for collective in collectives)


def unexplained(causes: Iterable[CollectiveOrigin]) -> tuple[CollectiveOrigin, ...]:
    """Return the causes that no strategy explains, most expensive first."""
    unexplained_causes = (cause for cause in causes if not cause.explained)
    return tuple(
        sorted(unexplained_causes, key=lambda cause: -cause.collective.wire_bytes_per_step)
    )


def significant(causes: Sequence[CollectiveOrigin]) -> tuple[CollectiveOrigin, ...]:
    """Return the unexplained causes that are worth a change: their share of all bytes is not small.

    XLA gathers, for example, the gradients of norms, which are a few kB, and no setting changes it.
    """
    total = sum(cause.collective.wire_bytes_per_step for cause in causes)
    return tuple(
        cause
        for cause in unexplained(causes)
        if cause.collective.wire_bytes_per_step >= _SMALL_SHARE * total
    )


def _seconds(
    collective: Collective, speeds: Mapping[str, float], program: ResolvedProgram
) -> float | None:
    slowest = min((speeds.get(axis, math.inf) for axis in collective.axes), default=math.inf)
    if program.target.slices > 1:  # a part inside of a slice is faster than one across slices
        slowest = speed_of(collective, program.mesh, program.target) or math.inf
    return None if math.isinf(slowest) else collective.wire_bytes_per_step / slowest


def _step_across_slices(collective: Collective, program: ResolvedProgram) -> str:
    """Return why a collective is a step of one across TPU slices; empty if it is none.

    The compiler reduces across slices in three steps: it scatters inside of each slice, sums across
    slices over the data-center network, and gathers inside of each slice.
    """
    if collective.network == "dcn":
        return "the step of a collective that is across slices, over the data-center network (DCN)"
    across = program.mesh.across(program.target.slices)
    if collective.op not in ("all-gather", "reduce-scatter"):
        return ""
    if all(across.get(axis, 1) == 1 for axis in collective.axes):
        return ""
    return "a step of a sum across slices: scattered before, or gathered after, the DCN is crossed"


def _describe_traffic(collective: Collective, moved: MovedArrays, reasons: Reasons) -> str:
    verb = _VERBS.get(collective.decomposed_from or collective.op, collective.op)
    kind = {"gradients": "gradient of ", "updated weights": "updated "}.get(moved.kind, "")
    phases = {scope.phase for scope in moved.scopes}
    phase = f" in the {phases.pop()} pass" if len(phases) == 1 and phases != {"update"} else ""
    axes = " and ".join(collective.axes)
    where = f"{collective.source}: " if collective.source else ""
    steps = ", in steps overlapped with a matrix product," if collective.decomposed_from else ""
    return f"{where}{kind}{moved} is {verb} over {axes}{steps}{phase}"


def _cost(collective: Collective, seconds: float | None) -> str:
    time = "" if seconds is None else f", {1e3 * seconds:.2g} ms per step"
    return f" ({collective.count} x {_amount(collective.bytes)}{time})"


def _amount(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _explanation(
    collective: Collective, moved: MovedArrays, known_reasons: list[Reason], reasons: Reasons
) -> str:
    why = " and ".join(str(reason) for reason in known_reasons)
    if reasons.keeps_whole(collective, moved):
        why += "; each device uses only its shard, so a reduce-scatter would send half as much"
    if moved.kind == "gradients" and reasons.in_microbatches(collective):
        why += '; after every microbatch, because batch.gradient_reduction = "per_microbatch"'
    return why


def _why_unexplained(
    collective: Collective,
    moved: MovedArrays,
    reasons_by_axis: Mapping[str, Reason | None],
    reasons: Reasons,
    annotations: Sequence[Mapping[str, Any]],
) -> str:
    axes = " and ".join(axis for axis, reason in reasons_by_axis.items() if reason is None)
    op = collective.decomposed_from or collective.op
    if moved.kind in ("weights", "updated weights"):
        return _of_weights(moved, axes, reasons, per_microbatch=reasons.in_microbatches(collective))
    if moved.kind == "gradients" and op == "all-gather":
        return (
            f"it is replicated over {axes}, but its parameter is sharded over {axes}; constrain it "
            "to the sharding of its parameter before the reduction"
        )
    if moved.kind == "gradients":
        return (
            f"no rule splits tokens over {axes}, so no sum over {axes} is needed; constrain the "
            "gradient to the sharding of its parameter"
        )
    if "loss" in moved.names or "head" in moved.names:
        advice = (
            f"the logits are replicated over {axes}; keep them sharded with "
            'constrain(scores, "batch", "seq", "vocab") until they are reduced'
        )
        return advice if op == "all-gather" else f"no rule requires it over {axes}"
    problem = "an involuntary reshard that no rule requires"
    if op == "all-gather":
        problem = f"an involuntary full rematerialization: no rule replicates it over {axes}"
    meeting = _conflict(collective, axes, annotations)
    return f"{problem}; {meeting or 'constrain() it to the sharding that its producer has'}"


def _of_weights(moved: MovedArrays, axes: str, reasons: Reasons, *, per_microbatch: bool) -> str:
    if per_microbatch:
        return (
            "once for every microbatch, although no rule shards stored weights over that axis; "
            "constrain them before the loop"
        )
    splitting_rules = [
        f"activations.{axis} = {', '.join(reasons.rules.activations[axis])}"
        for axis in reasons.axes_of(moved)
        if set(reasons.rules.activations.get(axis, ())) & set(axes.split(" and "))
    ]
    also = (
        f"; {' and '.join(splitting_rules)} also splits their products" if splitting_rules else ""
    )
    return f"no rule gathers weights over {axes}{also}; constrain() their products with that axis"


def _conflict(
    collective: Collective, axes: str, annotations: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return a sentence about two annotations that split arrays of equal shape differently.

    One of them is at the collective's line, or else in the same file. None if there is no pair.
    """
    same_line = [each for each in annotations if each["source"] == collective.source]
    mesh_axes = set(axes.split(" and "))
    file = collective.source.partition(":")[0]

    def over(annotation: Mapping[str, Any]) -> set[str]:
        return {name for names in annotation["split"] for name in names} & mesh_axes

    pairs = [
        (one, other)
        for one in same_line
        or [each for each in annotations if each["source"].startswith(f"{file}:")]
        for other in annotations
        if list(one["shape"]) == list(other["shape"])
        and one["source"] != other["source"]
        and _splits(one) != _splits(other)
        and (over(one) or over(other))
    ]
    if not pairs:
        return None
    one, other = min(pairs, key=lambda pair: _distance(*pair))
    return (
        f"{_describe_annotation(one)} and {_describe_annotation(other)} disagree on an array of "
        f"{list(one['shape'])}: "
        "use the same axes in both, or remove one"
    )


def _splits(annotation: Mapping[str, Any]) -> list[list[str]]:
    return [list(names) for names in annotation["split"]]


def _describe_annotation(annotation: Mapping[str, Any]) -> str:
    axes = ", ".join(repr(axis) if axis else "None" for axis in annotation["axes"])
    return f"constrain({axes}) at {annotation['source']}"


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[bool, int]:
    """Return a sort key: annotations in the same file first, then by distance in lines."""
    file, _, line = one["source"].partition(":")
    other_file, _, other_line = other["source"].partition(":")
    return file != other_file, abs(int(line or 0) - int(other_line or 0))
