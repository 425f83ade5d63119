"""A backend outside the tree, installed as docs/contributing/add-a-backend.md says."""

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT, Place

PAGE = ROOT / "docs/contributing/add-a-backend.md"
_FILE = re.compile(r"```(?:toml|python)\n# (\S+)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class PlaceWithPackages(Place):
    """A place whose commands also see the packages of a directory."""

    packages: Path
    variables: tuple[tuple[str, str], ...] = ()

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.packages), str(ROOT)))
        return super().environment() | {"PYTHONPATH": path} | dict(self.variables)


def install(directory: Path, version: str = "0.1.0") -> None:
    """Write the page's files, and the metadata that pip makes of its pyproject.toml."""
    files = dict(_FILE.findall(PAGE.read_text()))
    about = tomllib.loads(files.pop("pyproject.toml"))["project"]
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    metadata = directory / f"graphtrain_toy-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {version}\n"
    )
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in entries.items())
        for group, entries in about["entry-points"].items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture
def toy(cold, tmp_path):
    install(tmp_path / "packages")
    return PlaceWithPackages(cold.path, cold.cache, tmp_path / "packages")


WORDS = ["config.toml", "--target", "toy:1"]


@pytest.mark.usefixtures("compiled_quickly")
def test_a_backend_outside_the_tree_compiles_and_trains(toy, cold):
    assert "toy:1" in toy.command("plan", *WORDS)[0]
    toy.command("compile", *WORDS)
    assert "toy:1" in toy.command("cache", "ls")[0]
    toy.command("run", *WORDS, "--set", "run.directory=toy")
    cold.command("compile", "config.toml")
    cold.command("run", "config.toml")
    # It compiles with XLA:CPU too, but models write a CPU's programs otherwise (cpu_hints).
    for mine, other in zip(toy.curve("toy"), cold.curve(), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_its_package_sources_and_flags_are_in_the_key(toy):
    def toolchain(place):
        code = (
            "import json; from lowering.machine.toolchain import Toolchain;"
            "print(json.dumps(vars(Toolchain.current('toy'))))"
        )
        out, err = place.start_python("-c", code).communicate()
        return out or err

    first = toolchain(toy)
    assert '"graphtrain-toy": "0.1.0"' in first and '"jaxlib"' in first
    flags = PlaceWithPackages(toy.path, toy.cache, toy.packages, (("TOY_FLAGS", "--fast"),))
    assert '"TOY_FLAGS": "--fast"' in toolchain(flags)
    module = toy.packages / "graphtrain_toy/machines.py"
    module.write_text(module.read_text() + "# an edit\n")
    assert toolchain(toy) != first


def test_without_its_package_the_machine_is_unknown(cold):
    _, err = cold.command("plan", *WORDS, status=2)
    assert "unknown target machine 'toy'" in err
    assert "graphtrain.machines" in err


def test_a_machine_whose_backend_is_missing_says_what_to_install(toy):
    entries = toy.packages / "graphtrain_toy-0.1.0.dist-info/entry_points.txt"
    entries.write_text(entries.read_text().replace("[graphtrain.backends]", "[other]"))
    _, err = toy.command("compile", *WORDS, status=2)
    assert "no installed package provides the platform 'toy'; install the package" in err


def test_a_backend_that_lacks_a_function_is_refused_by_its_name(toy):
    module = toy.packages / "graphtrain_toy/backend.py"
    module.write_text(module.read_text().replace("def load(", "def load_later("))
    _, err = toy.command("compile", *WORDS, status=2)
    assert "the backend graphtrain_toy.backend of graphtrain-toy has no load;" in err
