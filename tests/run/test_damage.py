"""Damaged files and changed settings: a run resumes from what is sound, or says what is wrong."""

import json
import shutil

import pytest

LONGER = ["--set", "run.steps=18", "--set", "run.learning_rate.schedule=constant"]
CONSTANT = ["--set", "run.learning_rate.schedule=constant"]


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x21
    path.write_bytes(content)


@pytest.fixture
def run(place, corpus):
    """The directory of a run of 16 steps with checkpoints 8, 12 and 16, and data of its own."""
    (place.path / "data").unlink()
    shutil.copytree(corpus, place.path / "data")
    place.command("run", "config.toml", *CONSTANT)
    return place.path / "run"


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_gives_the_same_losses(place, run):
    place.command("run", "config.toml", *LONGER, "--set", "run.directory=whole")
    names = ["state/_METADATA", "about/metadata", "manifest.json"]
    largest = max((run / "checkpoints/16/state").rglob("d/*"), key=lambda file: file.stat().st_size)
    names.append(largest.relative_to(run / "checkpoints/16").as_posix())
    shutil.copytree(run, place.path / "sound")
    for name in names:
        shutil.rmtree(run)
        shutil.copytree(place.path / "sound", run)
        file = run / "checkpoints" / "16" / name
        flip(file, file.stat().st_size // 2)
        _, err = place.command("run", "config.toml", *LONGER)
        assert f"warning: run/checkpoints/16 is damaged: {name}" in err
        assert "moved it to run/quarantine/16-1, resuming from step 12" in err
        assert (run / "quarantine" / "16-1" / "state").is_dir()
        assert place.curve() == place.curve("whole")


def test_an_intact_copy_in_the_store_is_taken_in_place_of_a_damaged_checkpoint(place, run):
    """That of the same step first, then one that is newer than the checkpoint before."""
    store = ["--set", f"run.checkpoints.remote={place.path / 'store'}"]
    for step in (12, 16):
        place.command("checkpoints", "push", "run", "store", "--step", str(step))
    shutil.copytree(run, place.path / "sound")
    flip(run / "checkpoints/16/state/_METADATA", 9)
    out, err = place.command("run", "config.toml", *LONGER, *store)
    assert "trained 18 steps (resumed from 16)" in out
    assert "run/checkpoints/16 is damaged: moved it to run/quarantine/16-1, and took the c" in err
    shutil.rmtree(run)
    shutil.copytree(place.path / "sound", run)
    shutil.rmtree(place.path / "store")
    place.command("checkpoints", "push", "run", "store", "--step", "12")
    shutil.rmtree(run / "checkpoints/12")
    flip(run / "checkpoints/16/state/_METADATA", 9)
    out, err = place.command("run", "config.toml", *LONGER, *store)
    assert "trained 18 steps (resumed from 12)" in out
    assert "moved it to run/quarantine/16-1, resuming from step 12" in err


def test_without_a_sound_checkpoint_nothing_starts_anew(place, run):
    for step in (8, 12, 16):
        flip(run / "checkpoints" / str(step) / "state" / "_METADATA", 9)

    def contents():
        """All but the claims of the run directory, which are numbered."""
        return sorted(path for path in run.rglob("*") if ".lease" not in path.parts)

    before = contents()
    for _ in range(2):
        _, err = place.command("run", "config.toml", *LONGER, status=2)
        assert "run/checkpoints contains no sound checkpoint (16: state/_METADATA" in err
        assert "8: state/_METADATA" in err
    assert contents() == before


@pytest.mark.parametrize("command", ["evaluate", "generate", "convert"])
def test_other_commands_refuse_a_damaged_checkpoint_and_move_nothing(place, run, command):
    flip(run / "checkpoints" / "16" / "state" / "_METADATA", 9)
    words = {
        "evaluate": ["evaluate", "config.toml"],
        "generate": ["generate", "config.toml", "a"],
        "convert": ["convert", "graphtrain-to-hf", "run", "out"],
    }[command]
    before = sorted(run.rglob("*"))
    _, err = place.command(*words, status=2)
    assert "run/checkpoints/16 is damaged: state/_METADATA does not have the digest" in err
    assert sorted(run.rglob("*")) == before and not (place.path / "out").exists()


def test_a_run_resumes_with_other_settings_only_if_they_are_permitted_by_name(place, run):
    words = [*LONGER, "--set", "run.learning_rate.peak=5e-3", "--set", "run.data.overlong=drop"]
    _, err = place.command("run", "config.toml", *words, status=2)
    assert "run.learning_rate.peak was 0.01 and is 0.005" in err
    assert 'run.data.overlong was "error" and is "drop"' in err
    assert "--allow-change run.data.overlong --allow-change run.learning_rate.peak" in err
    old = (run / "config.toml").read_bytes()
    words += ["--allow-change", "run.learning_rate.peak", "--allow-change", "run.data.overlong"]
    place.command("run", "config.toml", *words)
    assert (run / "config.16.toml").read_bytes() == old != (run / "config.toml").read_bytes()
    metadata = json.loads((run / "checkpoints/18/about/metadata").read_text())
    change = {"step": 16, "name": "run.learning_rate.peak", "from": 0.01, "to": 0.005}
    assert change in metadata["changes"] and len(metadata["changes"]) == 2
    _, err = place.command("run", "config.toml", "--allow-change", "run.sead", *words, status=2)
    assert "--allow-change run.sead: no such setting" in err


def test_another_model_is_refused_before_its_program_is_looked_for(place, run):
    other = ["--set", "program.model.rope_theta=500000", "--set", "program.model.activation=geglu"]
    _, err = place.command("run", "config.toml", *LONGER, *other, status=2)
    assert "program.model.rope_theta was 10000.0 and is 500000.0" in err
    assert 'program.model.activation was "swiglu" and is "geglu"' in err
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("rope_theta = 10000.0", "rope_theta = 10001.0"))
    _, err = place.command("convert", "graphtrain-to-hf", "run", "out", status=2)
    assert "contains the weights of another model: program.model.rope_theta was 10000.0" in err


def test_more_steps_are_free_and_what_they_change_is_said(place):
    place.command("run", "config.toml")
    _, err = place.command("run", "config.toml", "--set", "run.steps=18")
    assert "warning: run.steps was 16 and is 18: the cosine schedule" in err
    assert "it was 0.000e+00 at step 16" in err


def test_damaged_data_is_refused_by_name(place, run):
    for name in ("train.bin", "train.idx", "train.json", "validation.bin"):
        path = place.path / "data" / name
        content = path.read_bytes()
        flip(path, len(content) // 2)
        _, err = place.command("run", "config.toml", *LONGER, status=2)
        assert f"error: data/{name}: " in err
        path.write_bytes(content)


def test_data_prepared_anew_from_other_text_is_refused(place, run):
    lines = [json.dumps({"text": f"another text {number} " * 40}) for number in range(60)]
    (place.path / "other.jsonl").write_text("\n".join(lines))
    place.command("data", "prepare", "other.jsonl", "--output", "other", "--tokenizer", "bytes")
    words = [*LONGER, "--set", "run.data.train=other/train"]
    _, err = place.command("run", "config.toml", *words, status=2)
    assert 'run.data.train was [{"digest": "' in err
    out, _ = place.command("run", "config.toml", *words, "--allow-change", "run.data.train")
    assert "trained 18 steps (resumed from 16)" in out


def test_a_broken_line_of_the_metrics_loses_no_other(place, run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    steps = {json.loads(line)["step"] for line in lines}
    damaged = [*lines[:3], '{"step": 4, "lo', "[1]", *lines[5:]]
    path.write_text("\n".join(damaged) + "\n")
    _, err = place.command("run", "config.toml", *LONGER)
    assert err.count("run/metrics.jsonl is not as this run wrote it (line 4, 5)") == 1
    assert {record["step"] for record in place.journal()} == (steps | {17, 18}) - {4, 5}
    assert (run / "metrics.16.damaged.jsonl").read_text().splitlines() == damaged


def test_a_changed_digit_of_the_metrics_is_said(place, run):
    path = run / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"grad_norm": 0', '"grad_norm": 1', 1))
    assert path.read_text() != text
    _, err = place.command("run", "config.toml", *LONGER)
    assert "run/metrics.jsonl is not as this run wrote it (up to step 16)" in err


def test_a_checkpoint_is_called_good_only_after_a_finite_step_from_it(place):
    # The update of step 4 is finite, its weights are not usable; they were saved in checkpoint 4.
    place.command("run", "config.toml", *CONSTANT, "--set", "run.steps=3")
    words = ["--set", "run.steps=8", "--set", "run.learning_rate.peak=1e30", *CONSTANT]
    words += ["--allow-change", "run.learning_rate.peak"]
    _, err = place.command("run", "config.toml", *words, status=2)
    assert "step 5: loss" in err and "gradient norm nan" in err
    assert "last good checkpoint: run/checkpoints/3; run/checkpoints/4 is newer, but no step" in err
    assert "lower run.learning_rate.peak" in err


def test_every_checkpoint_of_a_killed_run_is_complete_with_its_manifest(place):
    words = ["--set", "run.steps=4000", "--set", "run.checkpoints.local_every=1", *CONSTANT]
    for wanted in (5, 20, 35):
        process = place.start("run", "config.toml", *words)
        while len(place.curve()) < wanted and process.poll() is None:
            pass
        process.kill()
        process.communicate()
        steps = [path for path in (place.path / "run/checkpoints").iterdir() if path.name.isdigit()]
        assert all((path / "manifest.json").is_file() for path in steps)
    _, err = place.command("run", "config.toml", "--set", "run.steps=60", *CONSTANT)
    assert "damaged" not in err
    place.command(
        "run", "config.toml", "--set", "run.steps=60", *CONSTANT, "--set", "run.directory=whole"
    )
    assert place.curve() == place.curve("whole")
