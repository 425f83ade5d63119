"""Compile, train from the cache, evaluate: what the README promises."""

import json

import optax
import pytest
from places import CUBE, STAGES

from graphtrain.config import load_config

WATCH = """
import atexit, json, sys
import jax
seen = set()
jax.monitoring.register_event_duration_secs_listener(lambda name, *a, **k: seen.add(name))
jax.monitoring.register_event_listener(lambda name, **k: seen.add(name))
atexit.register(lambda: json.dump(sorted(seen), open("events.json", "w")))
"""


def events(place, code):
    """What JAX's own monitoring reports of a process that runs code."""
    process = place.start_python("-c", WATCH + code)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads((place.path / "events.json").read_text())


def of_the_compiler(names):
    return [name for name in names if "/core/compile/" in name or "compilation_cache" in name]


def test_what_was_compiled_trains(place):
    out, _ = place.command("run", "config.toml")
    curve = place.curve()
    assert [step for step, _, _ in curve] == list(range(1, 17))
    assert curve[-1][1] < curve[0][1] - 1
    assert "trained 16 steps, validation loss" in out
    written = load_config(place.path / "run/config.toml", ["run.directory=run"])
    assert written == load_config(place.path / "config.toml")
    assert list((place.path / "run/tensorboard").iterdir())
    record = place.journal()[0]
    names = {"learning_rate", "tokens_per_second", "mfu", "memory_bytes", "step_seconds"} | {
        "data_wait_seconds"
    }
    assert names <= set(record)


def test_each_step_has_the_rate_of_the_schedule(place):
    """The first step has half the peak of two warm-up steps, the last one the minimum."""
    words = ["--set", "run.learning_rate.minimum=0.001"]
    place.command("run", "config.toml", *words)
    rates = [record["learning_rate"] for record in place.journal() if "loss" in record]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, 2, 16, 0.001)
    assert rates == pytest.approx([float(schedule(step)) for step in range(1, 17)], rel=1e-5)


def test_evaluation_beside_a_bigram_model(place):
    place.command("run", "config.toml")
    out, _ = place.command("evaluate", "config.toml", "--bigram", "--json")
    result = json.loads(out)
    assert result["step"] == 16 and 0 < result["bigram_loss"] < 6
    assert result["validation_loss"] == pytest.approx(place.journal()[-1]["validation_loss"])


def test_a_warm_start_traces_and_compiles_nothing(place):
    code = "import sys; sys.argv = ['graphtrain', 'run', 'config.toml', *sys.argv[1:]]\n"
    code += "from graphtrain.cli import main; main()"
    assert of_the_compiler(events(place, code)) == []
    resumed = code.replace("'config.toml'", "'config.toml', '--set', 'run.steps=20'")
    assert of_the_compiler(events(place, resumed)) == []
    assert len(place.curve()) == 20


def test_the_watch_above_sees_a_compilation(place):
    assert of_the_compiler(events(place, "jax.numpy.ones(3) + 1"))


def test_a_second_compile_compiles_nothing(place):
    place.command("compile", "config.toml", "--report", "report.json")
    report = json.loads((place.path / "report.json").read_text())
    counts = {"total", "successful", "failed", "cached", "bundled"}
    assert {*counts, "seconds", "host", "graphs"} == set(report)
    assert (report["total"], report["successful"], report["cached"]) == (3, 0, 3)


def test_a_missing_program_is_explained_with_the_command_that_makes_it(place):
    words = ["config.toml", "--set", "program.batch.seq_len=16"]
    _, err = place.command("run", *words, status=3)
    assert "batch seq_len: 32 → 16" in err
    assert "graphtrain compile config.toml --set program.batch.seq_len=16" in err
    assert not place.curve()


@pytest.mark.usefixtures("compiled_quickly")
def test_compile_first_says_what_was_missing(cold):
    _, err = cold.command("run", "config.toml", "--compile", "--set", "run.steps=2")
    assert "compiling missing graphs: init, train, evaluate" in err
    assert len(cold.curve()) == 2


def test_another_layout_is_a_restore(place):
    place.command("run", "config.toml", "--set", "run.directory=whole", *CUBE)
    place.command("run", "config.toml", "--set", "run.steps=8", *CUBE)
    place.command("run", "config.toml", "--set", "run.learning_rate.schedule=cosine")
    losses = [[loss for _, loss, _ in place.curve(name)] for name in ("whole", "run")]
    # The first 8 steps were scheduled for a run of 8, so only the shape of the rest is compared.
    assert len(losses[1]) == 16 and losses[1][-1] < losses[1][0] - 0.5


def test_a_pipeline_trains_as_one_device_does(place):
    place.command("run", "config.toml")
    words = [*STAGES, "--set", "run.directory=stages"]
    place.command("compile", "config.toml", *words)
    place.command("run", "config.toml", *words)
    losses = [[loss for _, loss, _ in place.curve(name)] for name in ("run", "stages")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    ends = [place.journal(name)[-1]["validation_loss"] for name in ("run", "stages")]
    assert ends[1] == pytest.approx(ends[0], abs=1e-3)


@pytest.mark.usefixtures("compiled_quickly")
def test_a_pipeline_of_uneven_stages_goes_on_from_its_checkpoint(cold):
    words = [*STAGES, "--set", "program.model.layers=3", "--set", "program.pipeline.schedule=1f1b"]
    cold.command("compile", "config.toml", *words)
    cold.command("run", "config.toml", *words)
    again = [*words, "--set", "run.directory=again"]
    cold.command("run", "config.toml", *again, "--set", "run.steps=9")
    cold.command("run", "config.toml", *again)
    first, last = (cold.curve("run")[at][1] for at in (0, -1))
    assert last < first - 1
    assert [step for step, _, _ in cold.curve("again")] == list(range(1, 17))


def test_a_run_of_another_model_is_refused(place):
    place.command("run", "config.toml", "--set", "run.steps=2")
    words = ["--set", "program.model.mlp=64", "--compile", "--set", "run.steps=3"]
    _, err = place.command("run", "config.toml", *words, status=2)
    assert "was saved by another program" in err and "mlp" in err


def test_a_loss_that_is_not_finite_stops_the_run(place):
    words = ["--set", "run.learning_rate.peak=1e30", "--set", "run.learning_rate.schedule=constant"]
    _, err = place.command(
        "run", "config.toml", *words, "--set", "run.checkpoints.local_every=1", status=2
    )
    assert "the batch contains documents" in err and "last good checkpoint: none" in err
    assert "run/checkpoints/1 is newer, but no step from it was finite" in err
    saved = {int(path.name) for path in (place.path / "run/checkpoints").iterdir()}
    assert max(saved) <= max(step for step, _, _ in place.curve())
