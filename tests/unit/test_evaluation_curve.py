"""A curve of evaluations as a table, text, JSON and HTML."""

import json

from graphtrain.run.evaluation_curve import EvaluationCurve

CURVE = EvaluationCurve(
    {"all/acc": {10: 0.5, 20: 0.75}, "part/acc": {10: 0.5, 20: 1.0}, "late/acc": {20: 0.25}},
    {"all/acc": {10: 0.1, 20: 0.05}},
    frozenset({"part"}),
)


def test_a_table_has_a_line_for_each_step_and_leaves_open_what_was_not_measured():
    lines = CURVE.table().splitlines()
    assert lines[0].split() == ["step", "all/acc", "part/acc", "late/acc"]
    assert lines[1].split() == ["10", "0.5000", "0.5000"]
    assert lines[2].split() == ["20", "0.7500", "1.0000", "0.2500"]
    assert CURVE._repr_html_().count("<tr>") == 3


def test_json_has_metrics_and_standard_errors_of_each_step():
    first, second = json.loads(CURVE.json())
    assert first == {
        "step": 10,
        "metrics": {"all/acc": 0.5, "part/acc": 0.5},
        "standard_errors": {"all/acc": 0.1},
    }
    assert second["metrics"]["late/acc"] == 0.25


def test_charts_show_groups_and_not_their_members():
    chart = CURVE.chart()
    assert "all/acc" in chart and "late/acc" in chart and "part/acc" not in chart
    rows = CURVE._vega_lite()["data"]["values"]
    assert {row["metric"] for row in rows} == {"all/acc", "late/acc"}
    assert rows[0] == {"step": 10, "metric": "all/acc", "value": 0.5, "error": 0.1}
