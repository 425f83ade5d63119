"""Worker processes do not run the user's script again."""

import os
import subprocess
import sys
from pathlib import Path

from lowering.machine import worker_processes as processes

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys
print("the script runs", flush=True)
from lowering.machine.worker_processes import worker_context

for value in ("a", "b"):
    os.environ["VALUE"] = value
    context = worker_context("json")
    child = context.Process(target=os.system, args=("echo worker with $VALUE",))
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode
"""


def test_a_script_without_a_guard_runs_once_and_workers_see_the_environment(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["the script runs", "worker with a", "worker with b"]
    assert done.returncode == 0, done.stderr


def test_the_main_module_is_back_after_a_start():
    main = sys.modules["__main__"]
    with processes._without_main():
        assert sys.modules["__main__"] is not main
    assert sys.modules["__main__"] is main
