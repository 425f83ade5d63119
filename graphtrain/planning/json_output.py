"""JSON output of plans; the names of the keys contain the units, and null is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from graphtrain.planning.collective_origins import significant
from graphtrain.planning.memory_parts import PARTS, memory_sources
from graphtrain.planning.phases import phase_as_json
from graphtrain.planning.quantized_products import products_as_json
from graphtrain.planning.tables import plan_as_json

if TYPE_CHECKING:
    from graphtrain.cost_model.assessment import Assessment
    from graphtrain.cost_model.compute import PartFlops
    from graphtrain.cost_model.measured_time import MeasuredTime
    from graphtrain.planning.answer import Answer
    from graphtrain.planning.costs import Workload
from graphtrain.planning.targets import TargetRow


def target_rows(rows: Sequence[TargetRow], workload: Workload) -> list[dict[str, Any]]:
    """Return the rows of text.targets_table as JSON, with complete assessments."""
    return [
        {"target": row.target, "error": row.error}
        if row.assessment is None
        else assessment_as_json(row.assessment)
        | ({"phases": [phase_as_json(one) for one in row.phases]} if row.phases else {})
        | {"cost": workload.as_json(row.cost)}
        for row in rows
    ]


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON."""
    remedies = [
        {
            "change": list(remedy.change),
            "confirmed": remedy.confirmed,
            "peak_bytes": remedy.assessment.memory.peak,
            "step_seconds": remedy.assessment.time.total,
            "device_seconds": remedy.device_seconds,
        }
        for remedy in answer.remedies
    ]
    bars = {name: asdict(bar) for name, bar in answer.error_bars.items()}
    result = assessment_as_json(answer.assessment) | {
        "parameter_count": answer.parameters.trained,
        "frozen_parameter_count": answer.parameters.frozen,
        "error_bars": bars,
        "remedies": remedies,
    }
    if answer.phases:
        result["phases"] = [phase_as_json(one) for one in answer.phases]
    large = {id(cause) for cause in significant(answer.causes)}
    for row, cause in zip(result["collectives"], answer.causes, strict=False):
        row |= {"why": cause.explanation, "rule": cause.rule, "explained": cause.explained}
        row |= {"significant": cause.explained or id(cause) in large}
    return result


def assessment_as_json(assessment: Assessment) -> dict[str, Any]:
    """Return an assessment as JSON."""
    plan, memory, time = assessment.plan, assessment.memory, assessment.time
    parts = {f"{name}_bytes": getattr(memory, name) for name in (*PARTS, "capacity", "host")}
    return {
        "target": assessment.target,
        "devices": plan.mesh.devices,
        "mesh": dict(plan.mesh.axes),
        "memory": parts | {"source": memory.source},
        "chunk": assessment.chunk,
        "collectives": [
            asdict(one) | {"wire_bytes_per_step": round(one.wire_bytes_per_step)}
            for one in assessment.collectives
        ],
        "step_seconds": time.total,
        "step_seconds_is_lower_bound": not time.is_complete,
        "step_seconds_by_part": {
            "compute": time.compute,
            "memory": time.memory,
            "communication": dict(time.communication),
            "overlapped": time.overlapped,
            "bubble": time.bubble,
            "host": time.host,
            "starting": time.starting,
        },
        "measured": _measured_as_json(time.measured),
        "profile_note": time.profile_note,
        "achieved": time.achieved and asdict(time.achieved),
        "flops_by_part": [_part_as_json(part, plan.mesh.devices) for part in assessment.flops],
        "mfu": assessment.mfu,
        "mfu_causal": assessment.mfu_causal,
        "fits": memory.fits,
        "findings": list(assessment.findings),
        "flops_excess": assessment.flops_excess,
        "compile_seconds": assessment.compile_seconds,
        "quantized_products": products_as_json(assessment),
        "remark": assessment.note,
        "sources": {
            "memory": memory_sources(memory),
            "collectives": assessment.collectives_source,
            "step_seconds": time.source,
            "flops_by_part": "estimate",
            "mfu": "estimate",
            "mfu_causal": "estimate",
            "arrays": "rules",
        },
        "arrays": plan_as_json(plan),
    }


def _measured_as_json(time: MeasuredTime | None) -> dict[str, Any] | None:
    return time and asdict(time) | {"total": asdict(time.total)}


def _part_as_json(part: PartFlops, devices: int) -> dict[str, Any]:
    return {
        "part": part.name,
        "model_flops": part.needed,
        "adapter_flops": part.adapter,
        "recomputed_flops": part.recomputed,
        "flops_per_device": part.computed / devices,
        "replicas": part.replicas,
        "replicated_over": list(part.replicated_over),
    }
