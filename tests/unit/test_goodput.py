"""Goodput: the buckets of wall time add up to it, whatever happened to the processes."""

import json
import time
from pathlib import Path
from random import Random

import pytest
from in_process import graphtrain

from graphtrain.errors import TrainingError
from graphtrain.run.goodput.account import Goodput, account, read_goodput
from graphtrain.run.goodput.activities import BUCKETS, PREPARE, STEP
from graphtrain.run.goodput.page import goodput_page
from graphtrain.run.goodput.records import parse
from graphtrain.run.goodput.timeline import NAME, Timeline


class Written:
    """Lines of goodput.jsonl of processes that take the given times."""

    def __init__(self) -> None:
        self.lines: list[dict] = []
        self.now = 1e9

    def start(self, process: str, step: int, compile_seconds: float = 7.0) -> None:
        self.process, self.step = process, step
        self._add(event="start", host="a", pid=1)
        self.activity("prepare", 2.0)
        self.activity("restore", 1.0)
        self._add(event="begin", step=step, compile_seconds={"train": compile_seconds}, target="")

    def activity(self, activity: str, seconds: float, steps: int = 0, **counted: float) -> None:
        self.now += seconds
        self.step += steps
        counts = {"steps": steps, **counted} if steps else counted
        self._add(activity=activity, seconds=seconds, step=self.step, **counts)

    def _add(self, **fields) -> None:
        self.lines.append({"process": self.process, "at": self.now, **fields})

    def text(self) -> str:
        return "".join(json.dumps(line) + "\n" for line in self.lines)

    def account(self) -> Goodput:
        records = parse(self.text().encode())
        return account(Path("run"), records.processes, records.damaged_lines)


def killed_once() -> Written:
    """Ten steps of 1 s, the checkpoint after step 6; killed in step 11, and started after 5 s."""
    run = Written()
    run.start("one", 0)
    run.activity("first_step", 3.0, steps=1)
    run.activity("step", 5.0, steps=5)
    run.activity("save", 0.5)
    run.activity("step", 4.0, steps=4)
    run.activity("step", 0.5)
    run.now += 5.0
    run.start("two", 6)
    run.activity("first_step", 2.0)
    run.activity("first_step", 1.0, steps=1)
    run.activity("step", 8.0, steps=8)
    run.activity("evaluate", 1.5)
    run.lines.append({"process": "two", "at": run.now, "event": "end", "outcome": "completed"})
    return run


def test_steps_that_ran_again_are_wasted_and_the_rest_is_productive():
    result = killed_once().account()
    assert result.seconds == pytest.approx(
        dict.fromkeys(BUCKETS, 0.0)
        | {
            "step": 15.0,
            "program_startup": 4.0,
            "training_preparation": 4.0,
            "checkpoint_restore": 2.0,
            "checkpoint_save": 0.5,
            "evaluation": 1.5,
            "wasted_progress": 4.5,
            "infrastructure_recovery": 5.0,
        }
    )
    assert result.wall_seconds == pytest.approx(sum(result.seconds.values())) == 36.5
    assert (result.steps, result.wasted_steps) == (15, 4)
    assert [(one.first_step, one.last_step, one.outcome) for one in result.processes] == [
        (0, 10, "killed or lost"),
        (6, 15, "completed"),
    ]
    assert result.compile_seconds == 7.0


def test_waiting_for_data_counts_as_far_as_no_step_was_computed():
    run = Written()
    run.start("one", 0)
    run.activity("first_step", 1.0, steps=1)
    run.activity("step", 10.0, steps=10)  # data in time: a step takes 1 s
    run.activity("step", 12.0, steps=4, late=4, late_seconds=11.0)  # 4 s of them beside a step
    result = run.account()
    assert result.seconds["data_loading"] == pytest.approx(7.0)
    assert result.seconds["step"] == pytest.approx(16.0)


def test_the_time_after_a_completed_run_is_a_pause():
    run = killed_once()
    run.now += 1000.0
    run.start("three", 15)
    result = run.account()
    assert result.pause_seconds == pytest.approx(1000.0)
    assert result.wall_seconds == pytest.approx(36.5 + 3.0) == sum(result.seconds.values())


@pytest.mark.parametrize("seed", range(20))
def test_with_lost_and_damaged_lines_it_still_adds_up(seed):
    random = Random(seed)
    lines = killed_once().text().splitlines()
    for _ in range(random.randint(1, 6)):
        place = random.randrange(len(lines))
        damage = random.choice(["", lines[place][: random.randrange(60)], "[]", '{"at": NaN}'])
        lines[place] = damage
    records = parse("\n".join(lines).encode())
    result = account(Path("run"), records.processes, records.damaged_lines)
    assert sum(result.seconds.values()) == pytest.approx(result.wall_seconds)
    sound = killed_once().text().splitlines()
    assert result.damaged_lines == sum(line not in ("", *sound) for line in lines)
    goodput_page(result)


def test_nothing_is_written_before_the_run_can_no_longer_be_refused(tmp_path):
    timeline = Timeline()
    timeline.move(PREPARE)
    timeline.end("error: refused")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_loses_a_tenth_of_a_second(tmp_path):
    timeline = Timeline()
    timeline.open(tmp_path)
    timeline.begin(3, {"train": 2.5}, "cpu:1")
    timeline.move(STEP)
    timeline.finish_step(4, None)
    before = time.time()
    while time.time() < before + 0.45:  # in a long step, in which the main thread does nothing
        time.sleep(0.01)
    content, now = (tmp_path / NAME).read_bytes(), time.time()
    timeline.end("killed later")
    (process,) = parse(content).processes
    assert now - process.ended_at < 0.3
    assert process.outcome is None and process.first_step == 3
    assert [one.step for one in process.intervals if one.steps] == [4]


def test_a_timeline_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / NAME).mkdir()
    with (
        pytest.warns(UserWarning, match="goodput.jsonl is incomplete: it could not be written"),
        Timeline().recording() as _,
    ):
        timeline = Timeline()
        with timeline.recording():
            timeline.open(tmp_path)


def test_the_command_prints_a_table_json_and_a_page(tmp_path):
    (tmp_path / NAME).write_text(killed_once().text())
    shown = graphtrain("goodput", tmp_path)
    assert "goodput 41.1% of 36.5 s; 15 steps in 2 starts" in shown.out, shown.err
    assert "would have taken 7.0 s each time, 14.0 s in all" in shown.out
    page = tmp_path / "page.html"
    values = json.loads(graphtrain("goodput", tmp_path, "--json", "--html", page).out)
    assert values["seconds"] == pytest.approx(read_goodput(tmp_path).seconds)
    assert "wasted_progress: 4.50 s" in page.read_text()
    assert graphtrain("goodput", tmp_path, "--html", page).status == 0  # replaces its own page
    page.write_text("mine")
    assert "exists already" in graphtrain("goodput", tmp_path, "--html", page).err


def test_a_line_of_a_time_to_come_is_damaged(tmp_path):
    written = killed_once().text()
    (tmp_path / NAME).write_text(written)
    whole = read_goodput(tmp_path)
    later = json.loads(written.splitlines()[-1]) | {"at": time.time() + 4e9}
    (tmp_path / NAME).write_text(f"{written}\n{json.dumps(later)}\n")
    damaged = read_goodput(tmp_path)
    assert damaged.wall_seconds == whole.wall_seconds
    assert damaged.damaged_lines == whole.damaged_lines + 1


def test_without_records_it_says_who_writes_them(tmp_path):
    with pytest.raises(TrainingError, match="graphtrain run writes it when the first step"):
        read_goodput(tmp_path)
    refused = graphtrain("goodput", tmp_path)
    assert refused.status == 2 and "no such file" in refused.err


def test_records_without_a_start_are_refused(tmp_path):
    steps = [line for line in killed_once().text().splitlines() if '"start"' not in line]
    for content, damaged in (("", 0), ("{\n" * 3, 3), ("\n".join(steps), 0)):
        (tmp_path / NAME).write_text(content)
        refused = graphtrain("goodput", tmp_path)
        assert refused.status == 2 and not refused.out
        assert f"{NAME}: no start of a run is recorded in it ({damaged} damaged" in refused.err
