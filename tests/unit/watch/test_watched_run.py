"""News of a run for a page: once, and again when it changes."""

import json
import os

import pytest
from written_runs import CONFIG, append, records, write_checkpoint, write_goodput

from graphtrain.cache import Cache
from graphtrain.run.watch import server
from graphtrain.run.watch.records import parse_sample, parse_spike
from graphtrain.run.watch.slow_fact import SlowFact
from graphtrain.run.watch.watched_run import Known, WatchedRun
from lowering.machine.extras import MissingExtra


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def watched(run) -> WatchedRun:
    return WatchedRun("name", run, Cache(run.parent / "cache"))


def known(answer: dict) -> Known:
    return Known(answer["curves"], answer["sequence"], answer.get("digest", ""))


def test_only_what_is_new_is_told(run):
    append(run, records(1, 3))
    page = watched(run)
    first = page.answer(Known())
    assert [point[0] for point in first["points"]["loss"]] == [1, 2, 3]
    append(run, records(4, 4))
    second = page.answer(known(first))
    assert second["points"]["loss"] == [[4, 0.25]] and second["facts"]["step"] == 4
    third = page.answer(known(second))
    assert third["points"] == {} and "facts" not in third


def test_a_resumed_run_is_told_from_its_beginning(run):
    append(run, records(1, 5))
    page = watched(run)
    first = page.answer(Known())
    append(run, records(1, 2), "new")
    (run / "new").replace(run / "metrics.jsonl")
    second = page.answer(known(first))
    assert second["curves"] != first["curves"] and len(second["points"]["loss"]) == 2


def test_a_run_that_is_removed_while_it_is_watched_says_so_until_it_is_there_again(run):
    append(run, records(1, 3))
    page = watched(run)
    page.answer(Known())
    run.rename(run.parent / "away")
    facts = page.answer(Known())["facts"]
    assert (facts["state"], facts["step"]) == ("removed", 0)
    assert facts["problems"] == [f"{run} was removed or renamed while it was watched"]
    (run.parent / "away").rename(run)
    facts = page.answer(Known())["facts"]
    assert (facts["state"], facts["step"], facts["problems"]) == ("not running", 3, [])


def test_nothing_is_written_into_the_run(run):
    append(run, records(1, 3))
    write_goodput(run, None)
    write_checkpoint(run, 2)
    (run / "config.toml").write_text(CONFIG)

    def files() -> dict:
        return {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}

    before = files()
    watched(run).answer(Known())
    assert files() == before and not (run.parent / "cache").exists()


def test_plan_checkpoints_and_goodput_are_those_of_their_commands(run):
    append(run, records(1, 20))
    write_goodput(run, None)
    write_checkpoint(run, 10)
    os.truncate(write_checkpoint(run, 20) / "about" / "metadata", 3)
    (run / "checkpoints" / "30.orbax-checkpoint-tmp-1").mkdir()
    (run / "config.toml").write_text(CONFIG)
    facts = watched(run).answer(Known())["facts"]
    assert facts["state"] == "killed or lost" and facts["plan"]["steps"] == 100
    assert facts["plan"].get("unknown") is None
    assert facts["plan"]["source"] == "estimate" and facts["plan"]["seconds"] > 0
    assert facts["measured"] == {"step_seconds": 0.25, "memory_bytes": 1000000020}
    status = [(one["step"], one["status"]) for one in facts["checkpoints"]["rows"]]
    assert status == [(10, "complete"), (20, "damaged")]
    assert facts["checkpoints"]["unfinished"] == [30]
    assert facts["goodput"]["seconds"]["step"] == 5 and facts["goodput"]["wall_seconds"] == 10


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "metrics.jsonl does not exist yet: no step was taken"),
        (b'{"step": 1, "loss": 1.0}\n\0\0\0\n[]\n', "metrics.jsonl: left out 2 damaged lines"),
        (b'{"step": 1, "loss": 1.0}\n{"step": 2, "lo', "ends with half a line"),
    ],
)
def test_what_is_wrong_with_the_metrics_is_said(run, content, says):
    run.mkdir()
    if content is not None:
        (run / "metrics.jsonl").write_bytes(content)
    (run / "config.toml").write_text("[program]\nmodel = {")
    facts = watched(run).answer(Known())["facts"]
    assert says in "\n".join(facts["problems"])
    assert "config.toml" in facts["plan"]["problem"]
    assert "goodput.jsonl: no such file" in facts["goodput"]["problem"]


def test_a_run_that_does_not_exist_yet_is_told_so(run):
    facts = watched(run).answer(Known())["facts"]
    assert facts["state"] == "not started" and not run.exists()


def test_damaged_samples_and_spikes_are_left_out():
    sample = {"step": 3, "prompt": [{"role": "user", "content": "<b>"}], "text": "\ud800" * 5000}
    parsed = parse_sample(json.dumps(sample).encode())
    assert parsed is not None and parsed["prompt"] == "user: <b>" and len(parsed["text"]) < 4010
    parsed["text"].encode()
    spike = parse_spike(b'{"step": 1, "loss": NaN, "documents": {"a": [1, 2]}, "on_spike": 3}')
    assert spike is not None and spike["loss"] is None and spike["documents"] == 2
    for line in (b"", b"[1]", b'{"step": -1, "text": ""}', b'{"step": true}', b"[" * 100_000):
        assert parse_sample(line) is None and parse_spike(line) is None


def test_a_fact_that_takes_long_is_not_found_out_at_every_look():
    calls = []
    fact = SlowFact(lambda: calls.append(1) or len(calls))
    assert [fact.value() for _ in range(5)] == [1] * 5


def test_runs_of_the_same_name_have_their_paths(tmp_path):
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    assert server.run_names(paths) == [str(paths[0]), str(paths[1]), "other"]


def test_a_missing_package_is_named_with_both_extras(monkeypatch, tmp_path):
    monkeypatch.setattr(server, "is_installed", lambda module: module != "vl_convert")
    with pytest.raises(MissingExtra, match=r"watch needs vl-convert.*graphtrain\[html,serve\]"):
        server.serve_page([tmp_path], Cache(tmp_path), host="127.0.0.1", port=0, log=print)
