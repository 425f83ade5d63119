"""graphtrain plan search, as a shell sees it."""

import json
import tomllib

import pytest

CPU = ["--target", "cpu:2", "--set", "program.mesh.data=rest"]


@pytest.mark.usefixtures("compiled_quickly")
def test_the_best_is_compiled_and_written_as_a_configuration(cold):
    out, err = cold.command(
        "plan", "search", "config.toml", *CPU, "--verify", "1", "--output", "best.toml", "--json"
    )
    answer = json.loads(out)
    first, second = answer["strategies"][:2]
    assert first["source"] == "compiler" and second["source"] == "estimate" and first["fits"]
    assert "wrote best.toml" in err
    best = tomllib.loads((cold.path / "best.toml").read_text())
    given = tomllib.loads((cold.path / "config.toml").read_text())
    settings = first
    assert best["program"]["rules"] == settings["rules"]
    assert best["program"]["model"]["remat"] == settings["remat"]
    assert best["program"]["batch"]["microbatches"] == settings["microbatches"]
    assert best["run"]["directory"] == given["run"]["directory"]
    assert best["run"]["learning_rate"]["peak"] == given["run"]["learning_rate"]["peak"]
    cold.command("compile", "best.toml", "--report", "report.json")
    report = json.loads((cold.path / "report.json").read_text())
    assert {one["label"]: one["status"] for one in report["graphs"]}["train"] == "cached"


def test_an_estimate_names_the_reasons_and_needs_no_compiler(place):
    out, err = place.command(
        "plan", "search", "config.toml", "--target", "h100:16", "--verify", "0", "--top", "2",
        "--set", "program.batch.global_batch_size=32", "--set", "program.mesh.data=rest",
    )  # fmt: skip
    assert "strategies in" in out and err == ""
    assert "tensor 4: does not divide kv_heads = 2" in out
    ranked = out.partition("why other strategies rank lower")[0]
    assert sum(line.endswith(" estimate") for line in ranked.splitlines()) == 2


def test_nothing_that_fits_is_an_exit_status(place):
    out, _ = place.command(
        "plan", "search", "config.toml", "--target", "v5e:2x2", "--verify", "0",
        "--set", "program.model.vocab=1_000_000_000", status=4,
    )  # fmt: skip
    assert "no strategy fits" in out and "nothing fits: the smallest needs" in out


@pytest.mark.usefixtures("compiled_quickly")
def test_a_run_starts_the_winner_and_resumes_with_it(cold):
    """From the cache alone: without a search there is no strategy, and none is guessed."""
    searched = [*CPU, "--set", "run.steps=2", "--set", "run.search.max_global_batch_size=16"]
    _, err = cold.command("run", "config.toml", *searched, "--search", status=3)
    assert "no strategy has been searched for this configuration on cpu:2" in err
    assert "graphtrain compile config.toml" in err and err.rstrip().endswith("--search")
    _, err = cold.command("compile", "config.toml", *searched, "--search")
    assert "strategy of a search: " in err
    _, err = cold.command("run", "config.toml", *searched, "--search")
    assert "strategy of the last search: " in err and "compiling" not in err
    trained = tomllib.loads((cold.path / "run" / "config.toml").read_text())
    (cold.cache / "v1" / "searches").rename(cold.path / "forgotten")
    searched[searched.index("run.steps=2")] = "run.steps=3"
    _, err = cold.command("run", "config.toml", *searched, "--search")
    assert "strategy as in run: " in err
    resumed = tomllib.loads((cold.path / "run" / "config.toml").read_text())
    assert resumed["program"] == trained["program"] and resumed["run"]["steps"] == 3
