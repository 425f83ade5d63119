import dataclasses

import pytest

from graphtrain.planning.ledger import (
    Costs,
    LedgerEntry,
    append,
    error_bars,
    predict_compile_seconds,
    read,
)

ENTRY = LedgerEntry(
    target="v5p:2x2x2",
    request="0" * 40,
    when="2026-01-01T00:00:00Z",
    steps=10,
    stablehlo_bytes=1000,
    predicted=Costs(step_seconds=2.0, peak_bytes=100),
    measured=Costs(compile_seconds=5.0, step_seconds=3.0, peak_bytes=110),
)


def measured(seconds: float) -> LedgerEntry:
    return dataclasses.replace(ENTRY, measured=Costs(step_seconds=seconds))


def test_what_was_appended_is_read_back(tmp_path):
    path = tmp_path / "store" / "ledger.jsonl"
    append(path, ENTRY)
    append(path, measured(4.0))
    assert read(path) == [ENTRY, measured(4.0)]
    assert read(tmp_path / "none.jsonl") == []


def test_a_line_cut_short_by_a_kill_costs_that_line_alone(tmp_path):
    path = tmp_path / "ledger.jsonl"
    append(path, ENTRY)
    path.write_bytes(path.read_bytes() + b'{"target": "v5p:2x2')
    append(path, measured(4.0))
    assert read(path) == [ENTRY, measured(4.0)]


@pytest.mark.parametrize("line", ["3", "{}", '{"predicted": 1, "measured": 2}', "\x00\x00"])
def test_a_line_of_another_version_is_passed_over(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_text(f"{line}\n")
    append(path, ENTRY)
    assert read(path) == [ENTRY]


def test_the_worst_ratio_is_the_farthest_from_one_whichever_way():
    bars = error_bars([measured(1.0), measured(2.2), measured(3.0)], ENTRY.target)
    assert list(bars) == ["step_seconds"]
    bar = bars["step_seconds"]
    assert (bar.median, bar.worst, bar.count) == (1.1, 0.5, 3)


def test_step_times_count_only_where_the_same_source_predicted_them(tmp_path):
    append(tmp_path / "ledger.jsonl", dataclasses.replace(measured(2.2), step_source="profile"))
    entries = [measured(3.0), *read(tmp_path / "ledger.jsonl")]
    assert error_bars(entries, ENTRY.target)["step_seconds"].median == 1.5
    assert error_bars(entries, ENTRY.target, "profile")["step_seconds"].median == 1.1


def test_other_targets_and_what_was_never_predicted_make_no_error_bar():
    assert error_bars([ENTRY], "v5p:4x4x4") == {}
    assert "compile_seconds" not in error_bars([ENTRY], ENTRY.target)


def test_compile_time_is_predicted_from_programs_of_the_same_machine():
    assert predict_compile_seconds([ENTRY], "v5p:4x4x4", 2000) == 10.0
    assert predict_compile_seconds([ENTRY], "v5e:2x2", 2000) is None
