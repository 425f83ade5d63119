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
