"""Compiling: at once, with failures, with damage."""

import json

import psutil
import pytest


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.usefixtures("compiled_quickly")
def test_processes_at_once_compile_each_graph_once(cold, count):
    started = [
        cold.start("compile", "config.toml", "--report", f"report{n}.json") for n in range(count)
    ]
    for process in started:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    reports = [json.loads((cold.path / f"report{n}.json").read_text()) for n in range(count)]
    assert sum(report["successful"] for report in reports) == 3
    assert sum(report["cached"] for report in reports) == 3 * (count - 1)
    cold.command("cache", "verify")


def refused_by_tracing(place):
    """Write rules with which tracing fails, but for init, and return the words that use them."""
    (place.path / "twice.toml").write_text('[activations]\nbatch = "data"\nmlp = "data"\n')
    return ["--target", "cpu:2", "--set", 'program.rules=["twice.toml"]']


@pytest.mark.usefixtures("compiled_quickly")
def test_a_graph_that_fails_does_not_stop_the_others(cold):
    words = refused_by_tracing(cold)
    _, err = cold.command("compile", "config.toml", *words, "--report", "r.json", status=2)
    graphs = json.loads((cold.path / "r.json").read_text())["graphs"]
    outcomes = {graph["label"]: graph["status"] for graph in graphs}
    assert outcomes == {"init": "compiled", "train": "failed", "evaluate": "failed"}
    assert "mesh axis 'data' would split two dimensions" in err
    (failure,) = (graph["failure"] for graph in graphs if graph["label"] == "train")
    assert "two dimensions" in (cold.path / failure / "log.txt").read_text()


def test_a_worker_that_is_killed_is_tried_again(cold):
    process = cold.start("compile", "config.toml", "--report", "r.json")
    for line in process.stderr:
        if line == "train: compiling\n":
            break
    (server,) = (child for child in psutil.Process(process.pid).children() if len(child.children()))
    for worker in server.children():
        worker.kill()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    graphs = json.loads((cold.path / "r.json").read_text())["graphs"]
    attempts = {graph["label"]: graph["attempts"] for graph in graphs}
    assert attempts["train"] == 2
    cold.command("cache", "verify")


@pytest.mark.usefixtures("compiled_quickly")
def test_a_refusal_is_remembered_until_it_is_asked_for_again(cold):
    words = ["compile", "config.toml", *refused_by_tracing(cold), "--report", "r.json"]
    cold.command(*words, status=2)
    _, err = cold.command(*words, status=2)
    graphs = {one["label"]: one for one in json.loads((cold.path / "r.json").read_text())["graphs"]}
    assert graphs["train"]["attempts"] == 0 and "train: failed before" in err
    assert "(failed before; --retry-failed compiles it again)" in err
    (cold.path / "other.toml").write_text((cold.path / "config.toml").read_text())
    _, err = cold.command(*words[:2], "other.toml", *words[2:], status=2)
    assert "other.toml train: failed before" in err
    _, err = cold.command(*words, "--retry-failed", status=2)
    assert "train: tracing" in err and "failed before" not in err


@pytest.mark.usefixtures("compiled_quickly")
def test_a_graph_that_takes_too_long_is_stopped_and_not_remembered(cold):
    words = ["compile", "config.toml", "--report", "r.json"]
    _, err = cold.command(*words, "--timeout", "0.05", status=2)
    assert err.count("not compiled within 0.05 s (--timeout)") == 3
    cold.command(*words)
    assert json.loads((cold.path / "r.json").read_text())["successful"] == 3


@pytest.mark.usefixtures("compiled_quickly")
def test_a_flipped_byte_is_set_aside_and_compiled_again(cold):
    cold.command("compile", "config.toml")
    for payload in cold.cache.glob("v1/programs/*/payload"):
        data = bytearray(payload.read_bytes())
        data[len(data) // 2] ^= 1
        payload.write_bytes(data)
    _, err = cold.command("run", "config.toml", status=3)
    assert "warning:" in err and "damaged" in err
    cold.command("compile", "config.toml", "--report", "report.json")
    assert json.loads((cold.path / "report.json").read_text())["successful"] == 3
    cold.command("run", "config.toml", "--set", "run.steps=2")


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_compiled(cold):
    out, err = cold.command("compile", "config.toml", "--report", "no/where.json", status=2)
    assert out == "" and not cold.cache.exists()
    assert err == "error: --report: cannot write no/where.json: no: no such directory\n"
