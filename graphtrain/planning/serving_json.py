"""JSON output of the plan of serving; the names of the keys contain the units, null is unknown."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from graphtrain.planning.tables import plan_as_json

if TYPE_CHECKING:
    from graphtrain.cost_model.serving_assessment import Limit, ServingAssessment, Speed
    from graphtrain.planning.serving import ServingAnswer


def serving_as_json(answer: ServingAnswer) -> dict[str, Any]:
    """Return an answer as JSON; sizes are bytes of a device."""
    assessment = answer.assessment
    model = assessment.model
    return {
        "target": assessment.target,
        "purpose": answer.purpose,
        "devices": model.mesh.devices,
        "mesh": dict(model.mesh.axes),
        "dtype": model.program.model.dtype,
        "slots": model.slots,
        "context_length": model.context,
        "cached_positions": model.cached_positions,
        "layers_by_cached_positions": model.layers_by_positions,
        "kv_cache_bytes_per_token": model.kv_bytes_per_token,
        "kv_cache_bytes_per_slot": model.kv_bytes_per_slot,
        "memory": _memory(assessment),
        "fits": answer.fits,
        "largest_slots": _limit(assessment.slots),
        "longest_context": _limit(assessment.context),
        "speeds": [_speed(one) for one in assessment.speeds],
        "collectives": [
            asdict(one) | {"wire_bytes_per_step": round(one.wire_bytes_per_step)}
            for one in assessment.collectives
        ],
        "findings": list(assessment.findings),
        "remark": assessment.note,
        "sources": {
            "weights": "rules",
            "kv_cache": "rules",
            "collectives": assessment.collectives_source,
            "speeds": "roofline",
        },
        "arrays": plan_as_json(model.plan),
    }


def _memory(assessment: ServingAssessment) -> dict[str, Any]:
    memory = assessment.memory
    return {
        "weights_bytes": memory.weights,
        "adapter_bytes": assessment.model.adapter_bytes,
        "kv_cache_bytes": memory.kv_cache,
        "sampling_bytes": memory.sampling,
        "loading_bytes": memory.loading,
        "loading_source": memory.loading_source,
        "peak_bytes": memory.peak,
        "capacity_bytes": memory.capacity,
        "programs": {
            one.graph: {
                "temporaries_bytes": one.temporaries,
                "peak_bytes": memory.resident + one.temporaries,
                "source": one.source,
            }
            for one in memory.programs
        },
    }


def _limit(limit: Limit) -> dict[str, Any]:
    return {"value": limit.value, "source": limit.source, "limited_by": limit.limited_by}


def _speed(speed: Speed) -> dict[str, Any]:
    return {
        "what": speed.what,
        "program": speed.graph,
        "tokens": speed.tokens,
        "seconds": speed.seconds,
        "tokens_per_second": speed.tokens_per_second,
        "is_upper_bound": not speed.is_complete,
        "seconds_by_part": {
            "compute": speed.compute,
            "memory": speed.memory,
            "communication": dict(speed.communication),
        },
    }
