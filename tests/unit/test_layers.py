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


def test_facts_about_a_model_import_neither_jax_nor_pytorch():
    loaded = python(
        "import sys\n"
        "from graphtrain.config.schema import Model, TorchModel\n"
        "from graphtrain.graphs.open_model import open_language_model\n"
        "native = Model(layers=3, embed=8, heads=2, mlp=16, vocab=32, dropout=0.1)\n"
        "imported = TorchModel(torch='module:factory', vocab=32)\n"
        "for settings in (native, imported):\n"
        "    model = open_language_model(settings)\n"
        "    print(model.layer_count, model.has_dropout, model.has_separate_head,"
        " model.uses_module_names, model.mixes_sequences)\n"
        "print({'jax', 'flax', 'torch', 'transformers'} & set(sys.modules))"
    )
    assert loaded.splitlines() == [
        "3 True True False False",
        "None True False True False",
        "set()",
    ]
