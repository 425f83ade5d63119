"""Comparison of two dumps: files, measures, and the command."""

import dataclasses
import json

import numpy as np
import pytest
from in_process import graphtrain

from graphtrain.errors import DumpError
from graphtrain.run.dumps.compare import (
    compare_arrays,
    compare_dumps,
    compare_summaries,
    summary_of,
)
from graphtrain.run.dumps.files import ArrayEntry, DumpIndex, StoredDump, write_index, write_step
from graphtrain.run.dumps.host_arrays import merge_summaries
from graphtrain.run.dumps.index import changed_shapes
from graphtrain.run.dumps.steps import scale_facts, warn_unless_finite

NAMES = [f"forward/layers/{layer}/output" for layer in range(4)]
STEP, WEIGHTS = "step-000001", "model.safetensors"
INDEX = DumpIndex(
    target="cpu:1",
    mesh={},
    dtype="float32",
    summary=False,
    program="",
    identity={"program.model.embed": 8},
    versions={"jax": "0.10"},
    arrays=[],
    steps=[],
)


def arrays_of(seed=0):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((2, 3, 8)).astype(np.float32) for name in NAMES}


def write(directory, *steps, **about):
    """Write a dump with these arrays in each step, from step 1."""
    entries = [
        ArrayEntry(name, [2, 3, 8], "float32", [f"model.py:{line}"])
        for line, name in enumerate(steps[0], 1)
    ]
    is_summary = about.get("summary", False)
    step, later = about.pop("step", {"batch": "same"}), about.pop("later", {})
    listed = [
        write_step(
            directory, number, arrays, summary=is_summary, **step, **(later if number > 1 else {})
        )
        for number, arrays in enumerate(steps, 1)
    ]
    about = {"arrays": entries, "steps": listed} | about
    write_index(directory, dataclasses.replace(INDEX, **about))
    return StoredDump.open(directory)


def replace(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def flip_last(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))


def swap(a, b):
    between = a.rename(a.with_name("between"))
    b.rename(a)
    between.rename(b)


def test_the_first_difference_is_the_first_in_order_not_the_largest(tmp_path):
    right, wrong = [arrays_of(), arrays_of(1)], [arrays_of(), arrays_of(1)]
    wrong[1][NAMES[1]][1, 2, 3] += 0.5
    wrong[1][NAMES[2]] *= 100
    a, b = write(tmp_path / "a", *right), write(tmp_path / "b", *wrong)
    comparison = compare_dumps(a, b)
    first = comparison.first
    assert first is not None
    assert (first.step, first.name, first.index) == (2, NAMES[1], [1, 2, 3])
    assert first.max_abs == pytest.approx(0.5) and first.after == NAMES[0]
    assert first.lines == ("model.py:2",)
    assert [one.name for one in comparison.differences if one.differs] == NAMES[1:3]


def test_steps_of_another_phase_have_shapes_of_their_own(tmp_path):
    shapes = {"shapes": {name: [4, 5, 8] for name in NAMES}}
    longer = {name: np.ones((4, 5, 8), np.float32) for name in NAMES}
    wrong = longer | {NAMES[1]: longer[NAMES[1]] * np.float32(1.01)}
    a, b = (
        write(tmp_path / name, arrays_of(), arrays, later=shapes)
        for name, arrays in (("a", longer), ("b", wrong))
    )
    first = compare_dumps(a, b).first
    assert first is not None and (first.step, first.name) == (2, NAMES[1])
    with pytest.raises(DumpError, match=r"as float32 \[2, 3, 8\], and dump.json as .* \[4, 5, 8\]"):
        write(tmp_path / "c", arrays_of(), arrays_of(1), later=shapes).arrays(2)


def test_steps_of_phases_with_other_arrays_are_refused():
    before, now = (
        {"dump": {"arrays": [{"name": name, "shape": [2]} for name in names]}}
        for names in (("forward/embedding", "forward/logits"), ("forward/embedding",))
    )
    assert changed_shapes(now, now, 7) == {}
    with pytest.raises(DumpError, match="step 7 is of another phase, which lacks forward/logits"):
        changed_shapes(before, now, 7)


def test_one_wrong_element_of_many_is_seen():
    a = np.ones(1_000_000, np.float32)
    b = a.copy()
    b[123_456] = 1.01
    measured = compare_arrays(a, b)
    assert measured["relative"] == pytest.approx(0.01, rel=1e-3)
    assert measured["index"] == [123_456]


def test_measures_are_those_of_numpy():
    a, b = (np.random.default_rng(seed).standard_normal((40, 50)) for seed in (0, 1))
    measured = compare_arrays(a, b)
    gap = np.abs(a - b)
    assert measured["max_abs"] == gap.max()
    assert measured["relative"] == pytest.approx(
        max(np.linalg.norm(a - b) / np.linalg.norm(a), gap.max() / np.abs(a).max())
    )
    assert measured["cosine"] == pytest.approx(
        (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    )


def test_non_finite_elements_differ_unless_both_have_them():
    a = np.array([1, np.nan, np.inf], np.float32)
    assert compare_arrays(a, a)["relative"] == 0
    differing = compare_arrays(a, np.array([1, np.nan, -np.inf], np.float32))
    assert differing["relative"] == np.inf and differing["index"] == [2]
    assert compare_summaries(summary_of(a), summary_of(a[:1]))["relative"] == np.inf


def test_summaries_of_parts_are_those_of_the_whole():
    whole = np.random.default_rng(0).standard_normal((4, 10, 6)).astype(np.float32)
    whole[0, :3] = 0
    whole[1, 0, 0] = np.inf
    merged = merge_summaries(np.stack([summary_of(part) for part in whole]))
    expected = summary_of(whole)
    np.testing.assert_allclose(np.delete(merged, 2), np.delete(expected, 2), rtol=1e-6)
    assert merged[2] == pytest.approx(expected[2], abs=1e-3)  # one element fewer has a mean


def test_a_dump_of_summaries_compares_with_one_of_arrays(tmp_path):
    whole, other = arrays_of(), arrays_of()
    other[NAMES[2]] = other[NAMES[2]] * np.float32(1.01)
    summaries = {name: summary_of(array) for name, array in other.items()}
    a, b = write(tmp_path / "a", whole), write(tmp_path / "b", summaries, summary=True)
    first = compare_dumps(a, b).first
    assert first is not None and first.name == NAMES[2] and first.index is None
    assert first.relative == pytest.approx(0.01, rel=1e-3)


def test_tolerances_follow_the_coarser_dtype_unless_they_are_given(tmp_path):
    wrong = arrays_of()
    wrong[NAMES[0]] = wrong[NAMES[0]] * np.float32(1.01)
    a = write(tmp_path / "a", arrays_of())
    b = write(tmp_path / "b", wrong, dtype="bfloat16")
    assert compare_dumps(a, b).first is None
    assert compare_dumps(a, b, tolerance=1e-3).first is not None
    assert compare_dumps(a, b, tolerance=1e-3, absolute=1.0).first is None


def test_what_else_differs_is_noted(tmp_path):
    a = write(tmp_path / "a", arrays_of())
    identity, step = {"program.model.embed": 16}, {"batch": "other"}
    b = write(tmp_path / "b", arrays_of(), identity=identity, step=step, target="cpu:4")
    notes = compare_dumps(a, b).notes
    assert notes == (
        "program.model.embed: 8 and 16",
        "the batches differ, from step 1 on",
        "target: cpu:1 and cpu:4",
    )


def test_dumps_without_a_common_step_are_refused(tmp_path):
    a = write(tmp_path / "a", arrays_of())
    b = write(tmp_path / "b", arrays_of(), steps=[write_step(tmp_path / "b", 7, arrays_of())])
    with pytest.raises(DumpError, match="none in common"):
        compare_dumps(a, b)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "dump.json").unlink(), "contains no dump.json"),
        (lambda path: (path / "dump.json").write_text('{"steps": 3}'), "damaged"),
        (lambda path: (path / "dump.json").write_text('{"format": 1}'), "has format 1"),
        (lambda path: replace(path / "dump.json", b'"cpu:1"', b'"cpu:2"'), "digest differs"),
        (lambda path: (path / STEP / WEIGHTS).write_bytes(b"x"), "it is damaged"),
        (lambda path: (path / STEP / WEIGHTS).unlink(), f"{STEP} lacks {WEIGHTS}"),
        (lambda path: flip_last(path / STEP / WEIGHTS), f"{STEP}/{WEIGHTS} is not the file"),
        (lambda path: (path / STEP / f"{WEIGHTS}.index.json").touch(), "does not list; remove it"),
        (lambda path: swap(path / STEP, path / "step-000002"), "it is that of step 2"),
    ],
)
def test_damaged_dumps_are_refused(damage, message, tmp_path):
    write(tmp_path / "a", arrays_of())
    write(tmp_path / "b", arrays_of(), arrays_of(1))
    damage(tmp_path / "b")
    outcome = graphtrain("compare", tmp_path / "a", tmp_path / "b", "--common")
    assert outcome.status == 2 and message in outcome.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries[:3], f"has {NAMES[3]}, which dump.json does not list"),
        (lambda entries: [*entries, ArrayEntry("head", [1], "float32", [])], "lacks head"),
        (
            lambda entries: [dataclasses.replace(entries[0], shape=[48]), *entries[1:]],
            f"has {NAMES[0]} as float32 [2, 3, 8], and dump.json as float32 [48]",
        ),
        (
            lambda entries: [dataclasses.replace(entries[0], dtype="float16"), *entries[1:]],
            "and dump.json as float16 [2, 3, 8]",
        ),
    ],
)
def test_files_that_dump_json_does_not_describe_are_refused(change, message, tmp_path):
    b = write(tmp_path / "b", arrays_of())
    write_index(b.directory, dataclasses.replace(b.index, arrays=change(b.index.arrays)))
    outcome = graphtrain("compare", write(tmp_path / "a", arrays_of()).directory, b.directory)
    assert outcome.status == 2 and message in outcome.err


def test_what_is_not_finite_in_both_is_not_equal(tmp_path):
    arrays = arrays_of()
    arrays[NAMES[2]][0, 1, 3], arrays[NAMES[3]][:] = np.inf, np.nan
    step = {"loss_scale": 2.0**24, "skipped": True}
    whole = write(tmp_path / "whole", arrays, step=step).directory
    summaries = {name: summary_of(array) for name, array in arrays.items()}
    summary = write(tmp_path / "summary", summaries, step=step, summary=True).directory
    for other in (whole, summary):
        outcome = graphtrain("compare", whole, other)
        assert outcome.status == 5
        expected = f"2 arrays are not finite in both, the first of them {NAMES[2]} in step 1;"
        assert outcome.out.startswith(f"not all compared: {expected} equal: 2 arrays, within")
        for letter in "AB":
            reason = "overflowed at loss scale 16777216 and was skipped: 2 of 4 arrays have"
            assert f"step 1 in {letter} {reason}" in outcome.err
    report = json.loads(graphtrain("compare", whole, summary, "--json").out)
    assert report["equal"] is False and report["first"] is None and report["not_finite"] == 2

    wrong = {**arrays, NAMES[3]: arrays_of()[NAMES[3]]}
    outcome = graphtrain("compare", whole, write(tmp_path / "wrong", wrong).directory)
    assert outcome.status == 5
    assert "after 2 equal arrays and 1 not finite in both" in outcome.out
    assert "1 of 4 arrays differ; 1 array is not finite in both" in outcome.out


def test_a_skipped_step_is_told_when_it_is_dumped(tmp_path):
    arrays = arrays_of()
    facts = scale_facts({"loss_scale": np.float32(8), "grad_norm": np.float32(1)})
    warn_unless_finite(write_step(tmp_path, 1, arrays, **facts), 4)  # of finite arrays, nothing
    arrays[NAMES[3]][0] = np.nan
    with pytest.warns(UserWarning, match="step 2 is not finite: 1 of 4 arrays have elements"):
        warn_unless_finite(write_step(tmp_path, 2, arrays), 4)
    facts = scale_facts({"loss_scale": np.float32(8), "grad_norm": np.float32(np.nan)})
    with pytest.warns(UserWarning, match=r"step 3 overflowed at loss scale 8 and.*initial_scale"):
        warn_unless_finite(write_step(tmp_path, 3, arrays, **facts), 4)


def test_what_only_one_has_is_not_equal_unless_it_is_left_out(tmp_path):
    few = {name: array for name, array in arrays_of().items() if name != NAMES[1]}
    a = write(tmp_path / "a", arrays_of()).directory
    b = write(tmp_path / "b", few, few).directory
    outcome = graphtrain("compare", a, b)
    assert outcome.status == 5
    expected = "1 array only in A; 1 step only in B (--common leaves them out); equal: 3 arrays"
    assert outcome.out.startswith(f"not all compared: {expected}")
    outcome = graphtrain("compare", a, b, "--common")
    assert outcome.status == 0 and outcome.out.startswith("equal: 3 arrays")
    assert "1 array only in A; 1 step only in B (left out)" in outcome.out


def test_the_command_reports_the_first_difference_and_its_line(tmp_path):
    wrong = arrays_of()
    wrong[NAMES[1]][0, 0, 0] += 1
    write(tmp_path / "a", arrays_of())
    write(tmp_path / "b", wrong)
    same = graphtrain("compare", tmp_path / "a", tmp_path / "a")
    assert same.status == 0 and same.out.startswith("equal: 4 arrays")
    outcome = graphtrain("compare", tmp_path / "a", tmp_path / "b")
    assert outcome.status == 5
    assert f"first difference: {NAMES[1]} in step 1, after 1 equal array" in outcome.out
    assert "  made by     model.py:2\n" in outcome.out
    report = json.loads(graphtrain("compare", tmp_path / "a", tmp_path / "b", "--json").out)
    assert report["equal"] is False and report["first"]["name"] == NAMES[1]
