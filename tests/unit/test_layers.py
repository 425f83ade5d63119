"""Imports flow one way, and a command imports only what it needs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout


def test_packages_import_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_the_rules_import_only_the_standard_library():
    loaded = python(
        "import sys; before = set(sys.modules); import sharding_rules.plan;"
        "print({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names))"
    )
    assert loaded.strip() == "{'sharding_rules'}"


def test_compiling_imports_no_jax_in_the_parent_process():
    modules = "graphtrain.cli.compile, graphtrain.compile.driver, graphtrain.compile.request_keys"
    assert python(f"import sys, {modules}; print('jax' in sys.modules)").strip() == "False"


def test_training_imports_no_model():
    loaded = python(
        "import sys, graphtrain.run.train, lowering.xla.backend; print(*sys.modules)"
    ).split()
    assert not {"flax", "optax", "orbax", "grain", "tensorboardX"} & set(loaded)
