"""One resolution of a program: where names are resolved, and that an edited rule file is unseen."""

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

import graphtrain
from graphtrain.compile.request_keys import request_keys
from graphtrain.compile.tasks import tasks_of
from graphtrain.compile.worker import lower
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Batch, Mesh, Model, Program
from lowering.machine.target import Target
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

MODEL = Model(layers=2, embed=16, heads=2, mlp=32, vocab=32, dtype="float32")
BATCH = Batch(global_batch_size=4, seq_len=8)
BY_MLP = '[parameters]\nmlp = "tensor"\n'
BY_VOCAB = '[parameters]\nvocab = "tensor"\n'

_ROOT = Path(graphtrain.__file__).parent
_CALLS = re.compile(r"Target\.parse\b|Rules\.load\b|MeshShape\.resolve\b")
# Modules that resolve a name besides config/resolve.py, with the reason.
_OTHERS = {
    "api/checks/machine.py": "the compiler of a program that may not resolve",
    "api/checks/program.py": "finds every problem of a program that does not resolve",
    "api/checks/fallback.py": "the number of hosts is checked before anything is resolved",
    "api/evaluation.py": "hosts join each other before anything is resolved",
    "api/checks/samples.py": "the hosts of a target whose program may not resolve",
    "cli/compile.py": "names what an Ascend target lacks on this machine",
    "cli/plan_targets.py": "refuses wrong names of --targets before any is assessed",
    "compile/extracted_graphs.py": "the machine of a torch-xla script, which has no program",
    "config/problems.py": "the target of a configuration whose other settings are wrong",
    "launch/job.py": "needs only the number of hosts; rule files may be on the cluster alone",
    "planning/candidates.py": "the given mesh and rules, which need not fit, are replaced",
    "planning/costs.py": "prices name targets, of which one with a typo would price nothing",
    "planning/chosen.py": "the key of a search, whose mesh and rules are no part of it",
    "planning/lock.py": "an assessment, also one of another machine, names its target as text",
    "planning/reasons.py": "the rules of each strategy alone, to name the one that explains",
    "planning/search.py": "the memory of a device of a target; the mesh and rules are chosen",
    "weights/imported_export.py": "the host's CPU, on which weights are exported",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A rule file."""
    path = tmp_path / "own.toml"
    path.write_text(BY_MLP)
    return path


def resolved(rules: Path) -> ResolvedProgram:
    program = Program(
        target="cpu:2", mesh=Mesh(tensor=2), rules=(str(rules),), model=MODEL, batch=BATCH
    )
    return resolve(program)


def sharded(program: ResolvedProgram) -> set[str]:
    """Return the parameters that a worker's trace shards."""
    plan = lower(program, "train").plan
    begin = "state/parameters/"
    return {
        path.removeprefix(begin)
        for path, layout in plan.layouts.items()
        if path.startswith(begin) and any(layout.split)
    }


def test_names_are_resolved_in_one_place():
    calling = {
        path.relative_to(_ROOT).as_posix()
        for path in _ROOT.rglob("*.py")
        if _CALLS.search(path.read_text())
    }
    assert calling == {"config/resolve.py", *_OTHERS}


def test_graphs_models_and_cost_model_resolve_nothing():
    for folder in ("graphs", "models", "cost_model"):
        for path in (_ROOT / folder).rglob("*.py"):
            assert not re.search(r"\bresolve\(", path.read_text()), path


def test_a_rule_file_that_is_edited_after_the_key_is_not_read_again(own):
    (task,) = (task for task in tasks_of({"": resolved(own)}) if task.graph == "train")
    program = pickle.loads(pickle.dumps(task.program))  # as it reaches a worker process
    own.write_text(BY_VOCAB)

    assert sharded(program) == {"layers/mlp/up", "layers/mlp/down", "layers/mlp/gate"}
    assert request_keys(program)["train"] == task.request
    own.unlink()
    assert sharded(program) == {"layers/mlp/up", "layers/mlp/down", "layers/mlp/gate"}


def test_an_edited_rule_file_changes_the_key_of_the_next_resolution(own):
    before = resolved(own)
    own.write_text(BY_VOCAB)
    after = resolved(own)
    assert request_keys(before)["train"] != request_keys(after)["train"]
    assert sharded(after) == {"embedding/tokens", "head"}


def test_a_program_is_resolved_with_its_rules_mesh_and_target(own):
    program = resolved(own)
    assert program.target == Target("cpu", (2,))
    assert program.mesh == MeshShape.resolve({**program.mesh.axes, "tensor": 2}, 2)
    assert program.rules == Rules.load((str(own),))
    assert program.stages is None


def test_other_settings_keep_the_rules_that_were_read(own):
    program = resolved(own)
    own.write_text(BY_VOCAB)
    deeper = replace(program.settings, model=replace(MODEL, layers=4))
    assert program.with_settings(deeper).rules is program.rules
    assert program.with_settings(deeper).model.layers == 4


def test_other_settings_with_another_mesh_must_be_resolved(own):
    program = resolved(own)
    with pytest.raises(AssertionError, match="resolve"):
        program.with_settings(replace(program.settings, mesh=Mesh(data=2)))
