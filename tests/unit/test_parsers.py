"""Damaged files and odd options: each is read, or refused in a paragraph; nothing else happens.

HOSTILE_EXAMPLES=1000 tries more of them; tests/hostile/run.py tries them through the command.
"""

import os
from contextlib import chdir
from pathlib import Path
from random import Random

import damage
import parsers
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from graphtrain.config import load_config
from graphtrain.config.settings import known_settings
from graphtrain.errors import LaunchError
from graphtrain.launch.job import make_job
from graphtrain.launch.kubernetes import job_set
from graphtrain.launch.slurm import make_scripts
from lowering.machine.target import Target
from sharding_rules.documents import parse_toml

EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "6"))
some = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TEXT = st.text(st.characters(exclude_categories=()), max_size=60)  # also lone surrogates


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parsers")


@pytest.fixture(scope="module")
def sound(place: Path):
    """The sound files of a parser, by its name; they are read without an error."""

    def make(name: str) -> Path:
        path = place / name
        if not path.exists():
            path.mkdir()
            parsers.PARSERS[name].write(path)
            copy = place / "copy"
            parsers.copy_files(path, copy)
            assert damage.only_user_errors(lambda: parsers.PARSERS[name].read(copy))
        return path

    return make


@pytest.mark.parametrize("name", parsers.PARSERS)
def test_damaged_files_are_read_or_refused(name, sound, place):
    path = sound(name)

    @some
    @given(st.integers(0, 2**32))
    def check(seed):
        done = parsers.damage_copy(name, path, place / "copy", Random(seed))
        try:
            damage.only_user_errors(lambda: parsers.PARSERS[name].read(place / "copy"))
        except damage.Defect as defect:
            raise AssertionError(f"{done}: {defect}") from defect

    check()


VALUES = st.sampled_from(damage.ODD_TOML) | TEXT


@settings(some, max_examples=10 * EXAMPLES)
@given(data=st.data())
def test_odd_overrides_are_read_or_refused(data, sound):
    names = st.sampled_from([".".join(path) for path in known_settings()]) | TEXT
    changes = data.draw(st.lists(st.tuples(names, VALUES).map("=".join) | TEXT, max_size=3))
    damage.only_user_errors(lambda: parsers.config(sound("configuration"), *changes))


@settings(some, max_examples=10 * EXAMPLES)
@given(st.sampled_from(["cpu", "h100", "v5p", "trn1", "ascend-cpu", ""]), VALUES | TEXT)
@example("cpu", "1" * 6)
@example("v5p", "4x4x" + "9" * 5)
def test_odd_targets_are_read_or_refused(machine, size):
    def read():
        target = Target.parse(f"{machine}:{size}")
        str(target), target.devices, target.processes, target.memory_bytes

    damage.only_user_errors(read)


@some
@given(st.lists(TEXT, max_size=3), TEXT, TEXT, TEXT, st.integers(1, 2**40))
def test_odd_options_of_a_launch_are_taken_or_refused(
    sound, arguments, image, claim, name, workers
):
    with chdir(sound("configuration")):
        config = load_config(Path("a.toml"))

    def launch():
        job = make_job(config, arguments, Path(name or "x"), workers)
        job_set(job, image=image, claim=claim, namespace=name)
        make_scripts(job, {name: image})

    damage.only_user_errors(launch)


def test_a_line_break_cannot_become_a_command_of_a_batch_script(sound):
    with chdir(sound("configuration")):
        config = load_config(Path("a.toml"), ['run.directory="a\\nrm -rf x"'])
    with pytest.raises(LaunchError, match=r"job-name='a\\nrm -rf x-compile': a control character"):
        make_scripts(make_job(config, [], Path("cache"), 1), {})


@given(TEXT)
@settings(some, max_examples=20 * EXAMPLES)
@example("a = [" + "0.1, " * 500 + "]")
def test_any_text_is_toml_or_refused(text):
    damage.only_user_errors(lambda: parse_toml(text))
