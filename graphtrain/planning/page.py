"""HTML page of a plan: one self-contained file that needs no network.

Charts are drawn by Vega-Lite; its JavaScript comes with vl-convert and is embedded in the page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.planning.answer import Answer
from graphtrain.planning.text import answer_as_json, fit_summary
from lowering.extras import optional_import
from sharding_rules.pipeline import bubble_fraction, timeline

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_RECTANGLES = 20_000  # rectangles of a pipeline schedule that a browser draws quickly


def render_page(title: str, answer: Answer, searched: Sequence[dict[str, Any]] = ()) -> str:
    """Return the page as HTML.

    Args:
        title: title of the page, for example the name of the configuration.
        answer: the answer to show.
        searched: strategies in the format of `graphtrain plan search --json`.

    Raises:
        MissingExtra: vl-convert is not installed.
    """
    program, assessment = answer.program, answer.assessment
    on_cpu = program.target.platform == "cpu"
    data = answer_as_json(answer) | {
        "rules": list(program.settings.rules),
        "verdict": fit_summary(assessment),
        "capacity_source": "this machine" if on_cpu else "datasheet",
        "pipeline": _pipeline(program),
        "search": list(searched),
    }
    return Template(_read("plan.html")).substitute(
        title=html.escape(title),
        style=_read("plan.css"),
        data=_inside_script(json.dumps(data)),
        charts=_inside_script(_vega_lite()),
        script=_read("plan.js"),
    )


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
        "bubble": bubble_fraction(schedule, stages, rounds, microbatches),
        "work": [list(work) for work in timeline(schedule, stages, rounds, microbatches)],
    }


def _vega_lite() -> str:
    with optional_import("the HTML page"):
        import vl_convert
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _inside_script(text: str) -> str:
    """Escape text so that it cannot end the enclosing script element; strings keep their value."""
    return re.sub(r"<(?=/script|!--)", r"\\u003c", text, flags=re.IGNORECASE)


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
