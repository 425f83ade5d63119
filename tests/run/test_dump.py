"""graphtrain dump, as processes of their own, and what compare finds in what they write."""

import json

from in_process import graphtrain
from places import meeting_address

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
    other = ["--set", "program.model.norm_epsilon=0.1"]
    _, err = place.command("dump", "config.toml", "two", *SOME, *other, status=2)
    assert "contains the weights of another model: program.model.norm_epsilon" in err
    other += ["--step", "0"]
    place.command("dump", "config.toml", "two", *SOME, *other, "--compile", "--summary")
    outcome = graphtrain("compare", place.path / "one", place.path / "two")
    assert outcome.status == 5
    assert "first difference: forward/layers/0/mlp_norm in step 1" in outcome.out
    assert "program.model.norm_epsilon: 1e-05 and 0.1" in outcome.err
    assert graphtrain("compare", place.path / "one", place.path / "resumed").status == 2

    # Two processes, with the changed setting: as one process with it, and unlike the first dump.
    options = ["--coordinator", meeting_address(), "--processes", "2", "--rank"]
    words = ["dump", "config.toml", "both", *SOME, *other, "--compile", "--target", "cpu:2x1"]
    words += ["--set", "program.mesh.data=1", "--set", "program.mesh.fsdp=2", *options]
    both = [place.start(*words, str(rank)) for rank in (0, 1)]
    told = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert "of step 1 to both" in told[0][0] and "both" not in told[1][0]
    outcome = graphtrain("compare", place.path / "two", place.path / "both")
    assert outcome.status == 0 and "equal: " in outcome.out, outcome.out
    assert "batches differ" not in outcome.err
    outcome = graphtrain("compare", place.path / "one", place.path / "both")
    assert "first difference: forward/layers/0/mlp_norm in step 1" in outcome.out
