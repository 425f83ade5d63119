"""Optimizers with averaged weights, by the command: what is evaluated, saved and exported."""

import json
import urllib.request

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_serve_command import SMALL, serving

from graphtrain.checkpoints.arrays import restore_array
from graphtrain.config import load_config
from graphtrain.models.decoder import forward, parameter_specs
from lowering.trees import flatten, unflatten

CONSTANT = ["--set", "run.learning_rate.schedule=constant", "--set", "run.steps=8"]
FREE = [*CONSTANT, "--set", "program.optimizer.kind=schedule_free"]


def validation_loss(place, *words: str) -> float:
    out, _ = place.command("evaluate", "config.toml", *words, "--json")
    return json.loads(out)["validation_loss"]


@pytest.mark.usefixtures("compiled_quickly")
def test_a_schedule_free_run_saves_and_resumes_what_it_evaluated(place):
    _, err = place.command("run", "config.toml", *FREE[2:], status=2)
    assert 'run.learning_rate.schedule = "cosine"; set it to "constant"' in err
    place.command("compile", "config.toml", *FREE)
    place.command("run", "config.toml", *FREE)
    evaluated = [one["validation_loss"] for one in place.journal() if "validation_loss" in one]
    assert validation_loss(place, *FREE) == pytest.approx(evaluated[-1], rel=1e-6)
    whole = place.curve()
    assert whole[-1][1] < whole[0][1] - 0.3
    words = ["--to", "config.toml", "--step", "4"]
    _, err = place.command("convert", "reshard", "run", "other", *words, status=2)
    assert "another model or optimizer than config.toml: optimizer/adam/count is absent" in err
    (place.path / "run/checkpoints/8").rename(place.path / "8")
    _, err = place.command("run", "config.toml", *CONSTANT, status=2)
    assert 'program.optimizer.kind was "schedule_free" and is "adamw"' in err
    place.command("run", "config.toml", *FREE)
    assert place.curve() == whole

    # What is exported and generated with are the averaged weights, which the evaluation had.
    place.command("convert", "graphtrain-to-hf", "run", "folder")
    exported = load_file(place.path / "folder/model.safetensors")["model.embed_tokens.weight"]
    checkpoints = place.path / "run/checkpoints"
    averaged, z = (
        restore_array(checkpoints, 8, f"{part}/embedding/tokens")
        for part in ("parameters", "optimizer/schedule_free/z")
    )
    np.testing.assert_array_equal(exported, averaged)
    assert not np.array_equal(averaged, z)
    place.command("compile", "run", "--for", "generate")
    by_run, _ = place.command("generate", "run", "def ", "--tokens", "4", "--json")
    place.command("convert", "hf-to-graphtrain", "folder", "weights")
    words = ["--set", "run.init_from=weights", "--set", "run.directory=again"]
    by_export, _ = place.command(
        "generate", "run/config.toml", "def ", "--tokens", "4", "--json", *words
    )
    assert json.loads(by_run)["tokens"] == json.loads(by_export)["tokens"]

    # The server has the log-probabilities of the averaged weights, and not those of z.
    place.command("compile", "run", "--for", "serve", *SMALL)
    with serving(place, *SMALL, config="run") as url:
        served = first_log_probability(url, "def ")
    of_averaged, of_z = (
        log_probability(place, part) for part in ("parameters", "optimizer/schedule_free/z")
    )
    assert served == pytest.approx(of_averaged, abs=1e-3)
    assert abs(of_averaged - of_z) > 1e-2


def first_log_probability(url: str, prompt: str) -> float:
    """Log-probability of the token that the server finds likeliest after a prompt."""
    asked = {"model": "run", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["logprobs"]["token_logprobs"][0]


def log_probability(place, part: str) -> float:
    """The same by the weights in a part of the training state: that of the likeliest token."""
    model = load_config(place.path / "run/config.toml").program.model
    arrays = {
        path: restore_array(place.path / "run/checkpoints", 8, f"{part}/{path}")
        for path in flatten(parameter_specs(model))
    }
    tokens = np.array([[*b"def "]], np.int32)
    logits, _ = forward(model, unflatten(arrays), jnp.asarray(tokens))
    scores = np.asarray(logits, np.float64)[0, -1]
    return float(scores.max() - np.logaddexp.reduce(scores))


@pytest.mark.usefixtures("compiled_quickly")
def test_a_moving_average_begins_at_the_initial_weights_and_becomes_a_run_by_name(place):
    place.command("compile", "config.toml", *CONSTANT)
    place.command("run", "config.toml", *CONSTANT, "--set", "run.directory=first")
    words = [
        *CONSTANT,
        "--set",
        "program.optimizer.ema_decay=0.999",
        "--set",
        "run.init_from=first",
    ]
    place.command("compile", "config.toml", *words)
    export = ["--set", "run.export=hf", "--set", "run.export_weights=averaged"]
    place.command("run", "config.toml", *words, *export)
    (place.path / "averaged.toml").write_text((place.path / "run/config.toml").read_text())
    to = ["--to", "averaged.toml"]
    _, err = place.command("convert", "reshard", "first", "mean", "--averaged", *to, status=2)
    assert "first has no averaged weights; they are part of runs with" in err
    place.command("convert", "reshard", "run", "mean", "--averaged", *to)
    (evaluated,) = [one for one in place.journal() if "validation_loss" in one]
    start, end = (
        validation_loss(place, "--set", "run.directory=first"),
        validation_loss(place, *words),
    )
    mean = validation_loss(place, *words, "--set", "run.directory=mean")
    more = ["--set", "run.directory=mean", "--set", "run.steps=9"]
    _, err = place.command("run", "config.toml", *words, *more, status=2)
    assert 'weights was "averaged" and is unset' in err and "--allow-change weights" in err
    assert evaluated["averaged_validation_loss"] == mean
    assert end < start - 0.1 and abs(mean - start) < 0.02 and mean != start
    place.command("convert", "graphtrain-to-hf", "mean", "folder")
    place.command("convert", "graphtrain-to-hf", "run", "averaged", "--averaged")
    folders = "folder", "averaged", "run/hf-averaged-8"
    files = [place.path / name / "model.safetensors" for name in folders]
    assert len({file.read_bytes() for file in files}) == 1
    _, err = place.command("convert", "graphtrain-to-hf", "first", "none", "--averaged", status=2)
    assert "first has no averaged weights; they are part of runs with" in err


@pytest.mark.usefixtures("compiled_quickly")
def test_weights_that_are_not_finite_after_the_last_step_are_not_saved(place):
    """No further step has a loss that would show it."""
    (place.path / "mine.py").write_text(BREAKS_IN_STEP_6)
    words = ["--set", "program.optimizer.custom=mine.py:make", "--set", "run.steps=6"]
    words += ["--set", "run.checkpoints.local_every=4", "--set", "run.export=hf"]
    place.command("compile", "config.toml", *words)
    _, err = place.command("run", "config.toml", *words, status=2)
    assert "step 6 made weights that are not finite, though its loss was" in err
    assert "they are not saved; last good checkpoint: run/checkpoints/4" in err
    assert [path.name for path in (place.path / "run/checkpoints").iterdir()] == ["4"]
    assert not list((place.path / "run").glob("hf*"))
    evaluated = [one["validation_loss"] for one in place.journal() if "validation_loss" in one]
    assert evaluated[-1] is None


BREAKS_IN_STEP_6 = """
import jax, jax.numpy as jnp, optax

def make():
    def update(updates, steps, params=None):
        scale = jnp.where(steps == 5, jnp.nan, -0.01)
        return jax.tree.map(lambda one: scale * one, updates), steps + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
"""


@pytest.mark.usefixtures("compiled_quickly")
def test_a_start_whose_steps_all_overflowed_says_that_nothing_was_trained(place):
    words = ["--set", "program.precision.compute=float16", "--set", "run.steps=4"]
    words += ["--set", "program.precision.initial_scale=3e38"]
    place.command("compile", "config.toml", *words)
    _, err = place.command("run", "config.toml", *words)
    assert "all 4 steps of this start were skipped, because their gradients overflowed" in err
