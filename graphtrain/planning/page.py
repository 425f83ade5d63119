"""HTML page of a plan: one self-contained file that needs no network.

Charts are drawn by Vega-Lite; its JavaScript comes with vl-convert and is embedded in the page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from string import Template
from typing import Any

from graphtrain.config.render import toml
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.roofline import PartRoofline, rooflines
from graphtrain.planning.answer import Answer
from graphtrain.planning.json_output import answer_as_json
from graphtrain.planning.text import fit_summary
from lowering.machine.extras import missing_extra, optional_import
from sharding_rules.pipeline import bubble_fraction
from sharding_rules.timeline import timeline

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_RECTANGLES = 20_000  # rectangles of a pipeline schedule that a browser draws quickly


def render_page(
    title: str, answer: Answer, searched: Sequence[dict[str, Any]] = (), command: str = ""
) -> str:
    """Return the page as HTML.

    Args:
        title: title of the page, for example the name of the configuration.
        answer: the answer to show.
        searched: strategies in the format of `graphtrain plan search --json`.
        command: the command that makes the page, to be shown on it.

    Raises:
        MissingExtra: vl-convert is not installed.
    """
    program, assessment = answer.program, answer.assessment
    data = answer_as_json(answer) | {
        "rules": list(program.settings.rules),
        "verdict": fit_summary(assessment),
        "capacity_source": program.target.numbers_source,
        "pipeline": _pipeline(program),
        "rooflines": [_roofline(part) for part in rooflines(program, assessment.flops)],
        "search": list(searched),
        "command": command,
        "version": metadata.version("graphtrain"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "settings": _settings(asdict(program.settings)),
    }
    return Template(_read("plan.html")).substitute(
        title=html.escape(title),
        style=_read("plan.css"),
        data=_inside_script(json.dumps(data)),
        charts=_inside_script(vega_lite()),
        script=_read("plan.js"),
    )


def _roofline(part: PartRoofline) -> dict[str, Any]:
    return {
        "part": part.flops.name,
        "model_flops": part.flops.model,
        "recomputed_flops": part.flops.recomputed,
        "replicas": part.flops.replicas,
        "replicated_over": list(part.flops.replicated_over),
        "device_flops": part.device_flops,
        "compute_seconds": part.compute_seconds,
        "weight_bytes": part.weight_bytes,
        "weight_seconds": part.weight_seconds,
    }


def _settings(tables: Mapping[str, Any], prefix: str = "program") -> dict[str, str]:
    """Return all settings of a table that have a value, with the names that --set takes."""
    settings: dict[str, str] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            settings |= _settings(value, f"{prefix}.{name}")
        elif value is not None:
            settings[f"{prefix}.{name}"] = toml(value)
    return settings


def _pipeline(program: ResolvedProgram) -> dict[str, Any] | None:
    """Return the schedule of a pipeline; None without a pipeline, or if it is too long to draw."""
    stages = program.mesh.size(("stage",))
    rounds, microbatches = program.pipeline.virtual_stages, program.batch.microbatches
    if stages == 1 or 2 * stages * rounds * microbatches > _MAX_RECTANGLES:
        return None
    schedule = program.pipeline.schedule
    return {
        "schedule": schedule,
        "stages": stages,
        "rounds": rounds,
        "microbatches": microbatches,
        "bubble": bubble_fraction(stages, rounds, microbatches),
        "work": [list(work) for work in timeline(schedule, stages, rounds, microbatches)],
    }


def require_charts(purpose: str = "the HTML page") -> None:
    """Raise MissingExtra if vl-convert is not installed, which draws charts."""
    if util.find_spec("vl_convert") is None:
        raise missing_extra("vl_convert", purpose)


def vega_lite() -> str:
    """Return the JavaScript of Vega-Lite, which defines window.vegaEmbed."""
    with optional_import("the HTML page"):
        import vl_convert
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _inside_script(text: str) -> str:
    """Escape text so that it cannot end the enclosing script element; strings keep their value."""
    return re.sub(r"<(?=/script|!--)", r"\\u003c", text, flags=re.IGNORECASE)


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
