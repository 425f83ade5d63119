"""A plan as one self-contained page: open it from a disk with no network; it loads nothing.

Charts are drawn by Vega-Lite, whose JavaScript vl-convert carries and the page takes in.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from graphtrain.config.schema import Program
from graphtrain.errors import PlanError
from graphtrain.planning.answer import Answer
from graphtrain.planning.text import answer_as_json, verdict
from lowering.machine.target import Target
from sharding_rules.pipeline import bubble, timeline

_TEMPLATES = Path(__file__).parent / "templates"
_MOST_WORK = 20_000  # pieces of a schedule that a browser still draws quickly


def page(title: str, answer: Answer, searched: Sequence[dict[str, Any]] = ()) -> str:
    """The page as HTML.

    Args:
        title: of the page, as the name of the configuration.
        searched: strategies as `graphtrain plan search --json` prints them.

    Raises:
        PlanError: vl-convert is not installed.
    """
    program, assessment = answer.program, answer.assessment
    on_cpu = Target.parse(program.target).platform == "cpu"
    data = answer_as_json(answer) | {
        "rules": list(program.rules),
        "verdict": verdict(assessment),
        "capacity_source": "this machine" if on_cpu else "datasheet",
        "pipeline": _pipeline(program, assessment.plan.mesh.size(("stage",))),
        "search": list(searched),
    }
    return Template(_read("plan.html")).substitute(
        title=html.escape(title),
        style=_read("plan.css"),
        data=_inside_script(json.dumps(data)),
        charts=_inside_script(_vega_lite()),
        script=_read("plan.js"),
    )


def _pipeline(program: Program, stages: int) -> dict[str, Any] | None:
    """The schedule of a pipeline; None without one, or where it is too long to draw."""
    rounds, microbatches = program.pipeline.rounds, program.batch.microbatches
    if stages == 1 or 2 * stages * rounds * microbatches > _MOST_WORK:
        return None
    schedule = program.pipeline.schedule
    return {
        "schedule": schedule,
        "stages": stages,
        "rounds": rounds,
        "microbatches": microbatches,
        "bubble": bubble(schedule, stages, rounds, microbatches),
        "work": [list(work) for work in timeline(schedule, stages, rounds, microbatches)],
    }


def _vega_lite() -> str:
    try:
        import vl_convert
    except ModuleNotFoundError:
        raise PlanError(
            "a page needs vl-convert for its charts; run: pip install 'graphtrain[html]'"
        ) from None
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _inside_script(text: str) -> str:
    """Text that cannot end the script element around it; in a string it means the same."""
    return re.sub(r"<(?=/script|!--)", r"\\u003c", text, flags=re.IGNORECASE)


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
