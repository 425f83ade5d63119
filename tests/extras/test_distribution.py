"""The wheel and the source distribution, built and installed as a user would."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("graphtrain", "lowering", "sharding_rules")
CONFIG = """
[program]
target = "cpu:1"
[program.model]
layers = 2
embed = 32
heads = 2
mlp = 64
vocab = 257
[program.batch]
global_batch_size = 4
seq_len = 32
[run]
directory = "runs/small"
steps = 2
data = { train = "data/train", validation = "data/validation" }
"""


def done(*command, **options):
    ended = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Return the source distribution, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def files_of_the_packages():
    tracked = done("git", "ls-files", *PACKAGES, cwd=ROOT).splitlines()
    return {path for path in tracked if (ROOT / path).exists()}


def test_the_metadata_is_accepted_by_the_index(distributions):
    assert "PASSED" in done(sys.executable, "-m", "twine", "check", "--strict", *distributions)


def test_the_wheel_has_every_file_of_the_packages_and_no_other(distributions):
    names = zipfile.ZipFile(distributions[1]).namelist()
    assert {name for name in names if ".dist-info/" not in name} == files_of_the_packages()


def test_the_source_distribution_has_what_is_tracked_and_no_other(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = done("git", "ls-files", cwd=ROOT).splitlines()
    assert names - {"PKG-INFO"} <= set(tracked)
    assert files_of_the_packages() | {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory):
    """Return the environment in which the wheel is installed, and its command."""
    environment = tmp_path_factory.mktemp("environment")
    done(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin/python"
    done(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", distributions[1])
    # Dependencies are those of this environment; its editable graphtrain is not found by a .pth.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin/graphtrain"


def test_an_installed_wheel_trains_a_model_from_another_directory(installed, tmp_path):
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def graphtrain(*arguments):
        return done(installed, *arguments, cwd=tmp_path, env=variables)

    (tmp_path / "small.toml").write_text(CONFIG)
    version = graphtrain("--version").split()[-1]
    assert version in done("grep", "-m1", "^version", ROOT / "pyproject.toml")
    graphtrain("data", "sample", "corpus.jsonl")
    graphtrain("data", "prepare", "corpus.jsonl", "--output", "data", "--tokenizer", "bytes")
    table = graphtrain("plan", "small.toml", "--targets", "h100:4,v5p:2x2x1", "--no-compile")
    assert "h100:4" in table and "v5p:2x2x1" in table
    assert "trained 2 steps" in graphtrain("run", "small.toml", "--compile")
    where = done(
        installed.with_name("python"), "-c", "import graphtrain; print(graphtrain.__file__)",
        cwd=tmp_path, env=variables,
    )  # fmt: skip
    assert where.startswith(str(installed.parents[1]))
