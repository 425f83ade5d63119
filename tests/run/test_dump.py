"""graphtrain dump, as processes of their own, and what compare finds in what they write."""

import json

from in_process import graphtrain

SOME = ["--arrays", "layers/*/mlp*"]


def test_a_run_is_dumped_unchanged_and_a_changed_setting_is_found(place):
    _, err = place.command("dump", "config.toml", "none", *SOME, status=3)
    assert "no compiled dump step" in err and "--for dump" in err
    assert not (place.path / "none").exists()
    wrong = ["--arrays", "layers/*/atention", "none"]
    _, err = place.command("dump", "config.toml", *wrong, status=2)
    assert (
        "no array matches 'layers/*/atention'; the names are embedding, layers/*/attention" in err
    )

    place.command("run", "config.toml", "--set", "run.steps=4")
    before = sorted(path.name for path in (place.path / "run").rglob("*"))
    words = ["--steps", "2", "--compile", "--json"]
    out, _ = place.command("dump", "config.toml", "resumed", *SOME, *words)
    assert json.loads(out)["steps"] == [5, 6]
    assert sorted(path.name for path in (place.path / "run").rglob("*")) == before

    place.command("dump", "config.toml", "one", *SOME, "--step", "0")
    other = ["--set", "program.model.norm_epsilon=0.1", "--set", "run.directory=other"]
    place.command("dump", "config.toml", "two", *SOME, *other, "--compile", "--summary")
    outcome = graphtrain("compare", place.path / "one", place.path / "two")
    assert outcome.status == 5
    assert "first difference: forward/layers/0/mlp_norm in step 1" in outcome.out
    assert "program.model.norm_epsilon: 1e-05 and 0.1" in outcome.err
    assert graphtrain("compare", place.path / "one", place.path / "resumed").status == 2
