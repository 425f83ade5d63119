"""The checkpoint of the lowest validation loss, early stopping, and starting again."""

# A rate so high that the validation loss rises from the start, on any processor.
OVERFIT = [
    "--set", "run.learning_rate.schedule=constant", "--set", "run.learning_rate.peak=3",
    "--set", "run.learning_rate.warmup_steps=14", "--set", "run.evaluate_every=2",
    "--set", "run.checkpoints.keep=1", "--set", "run.steps=40",
    "--set", "run.checkpoints.local_every=100",
]  # fmt: skip
PATIENCE = ["--set", "run.checkpoints.keep_best=true", "--set", "run.early_stopping_patience=3"]


def saved(place, directory="run"):
    return sorted(int(path.name) for path in (place.path / directory / "checkpoints").iterdir())


def validation_losses(place):
    return {r["step"]: r["validation_loss"] for r in place.journal() if "validation_loss" in r}


def test_a_run_stops_early_and_keeps_its_best_checkpoint(place):
    out, _ = place.command("run", "config.toml", *OVERFIT, *PATIENCE)
    losses = validation_losses(place)
    best, last = min(losses, key=losses.get), max(losses)
    assert last == best + 6 < 40
    assert f"stopped early after step {last}" in out and f"since step {best}" in out
    assert saved(place) == [best, last]
    export = ["--set", "run.export=hf", "--set", "run.export_weights=best"]
    out, _ = place.command("run", "config.toml", *OVERFIT, *PATIENCE, *export)
    assert "stopped early" in out and validation_losses(place) == losses
    assert f"exported to run/hf-{best}\n" in out
    assert (place.path / f"run/hf-{best}/config.json").is_file()

    out, _ = place.command("evaluate", "run", "--step", "best", "--json")
    assert f'"step": {best}' in out

    more = [*PATIENCE[:2], "--set", "run.early_stopping_patience=4"]
    out, _ = place.command("run", "config.toml", *OVERFIT, *more)
    assert f"stopped early after step {last + 2}" in out
    assert saved(place) == [best, last + 2]  # the best of an earlier process stays too


def test_a_complete_run_says_so_and_fresh_starts_again(place):
    words = ["config.toml", "--set", "run.steps=4"]
    place.command("run", *words)
    first = place.curve()
    out, _ = place.command("run", *words)
    assert "run already has 4 steps" in out and "trained" not in out

    (place.path / "run/notes.txt").write_text("mine")
    _, err = place.command("run", *words, "--fresh", "--set", "run.seed=1")
    assert "moved the earlier run to run/earlier/1" in err
    assert place.curve() != first
    assert place.curve("run/earlier/1") == first
    assert (place.path / "run/earlier/1/notes.txt").read_text() == "mine"


def test_best_needs_an_evaluated_checkpoint(place):
    none = ["--set", "run.data={train='data/train'}", "--set", "run.steps=4"]
    place.command("run", "config.toml", *none)
    _, err = place.command("convert", "graphtrain-to-hf", "run", "out", "--step", "best", status=2)
    assert "no checkpoint in run/checkpoints was saved with a validation loss" in err
    _, err = place.command(
        "run", "config.toml", *none, "--set", "run.checkpoints.keep_best=true", status=2
    )
    assert "keep_best needs data.validation" in err


def test_a_run_says_what_it_trains_and_keeps_a_log(place):
    words = ["config.toml", "--set", "run.steps=4"]
    _, err = place.command("run", *words)
    lines = err.splitlines()
    assert lines[0].startswith("model: ") and lines[0].endswith(" parameters")
    assert lines[1] == "batch: 256 tokens a step (8 x 32)"
    assert lines[2].startswith("data: data/train, ") and " 4 steps are 0." in lines[2]
    assert lines[3:5] == ["machine: cpu:1", "directory: run, a new run, steps 1 to 4"]
    log = (place.path / "run/run.log").read_text()
    assert all(line in log for line in lines)
    assert "saved run/checkpoints/4" in log

    more = ["config.toml", "--set", "run.steps=6"]
    out, err = place.command("run", *more, "--quiet")
    assert "resumes from step 4" not in err and "trained 6 steps" in out and "step 6/6" not in err
    log = (place.path / "run/run.log").read_text()
    assert "directory: run, resumes from step 4, steps 5 to 6" in log
    assert "warning: run.steps was 4 and is 6" in log and "step 6/6" in log

    _, err = place.command("run", *more, "--set", "run.learning_rate.peak=1", status=2)
    assert "error: " not in (place.path / "run/run.log").read_text()  # not yet of this run
