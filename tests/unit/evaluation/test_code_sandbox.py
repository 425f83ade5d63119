"""Code of a model computes and reads files, and can do nothing else."""

import os
import platform
import sys

import pytest

from graphtrain.run.evaluation import code_sandbox
from graphtrain.run.evaluation.code_runner import SYSTEM_CALLS
from graphtrain.run.evaluation.code_sandbox import CodeEvaluation, run_program

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in SYSTEM_CALLS,
    reason="needs a filter of system calls of Linux",
)

SOUND = (
    "",
    "import collections, datetime, heapq, itertools, json, math, random, re, string, typing\n"
    "assert math.gcd(4, 6) == 2 and random.random() < 1",
    "import hashlib, decimal, fractions, functools, statistics\n"
    "assert hashlib.md5(b'a').hexdigest()[:2] == '0c'",
    "if __name__ == '__main__':\n    raise SystemExit",
    "print('x' * 10)\nimport time\ntime.sleep(0.01)",
)
FORBIDDEN = (
    "import socket\nsocket.socket()",
    "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "import os\nos.fork()",
    "import subprocess\nsubprocess.run(['true'])",
    "import os\nassert os.system('true') == 0",
    "import threading\nthreading.Thread(target=print).start()",
    "open('written', 'w')",
    "open({path!r}, 'a')",
    "import os\nos.remove({path!r})",
    "import os\nos.rename({path!r}, {path!r} + '2')",
    "import os\nos.mkdir({path!r} + '3')",
    "import os\nos.chmod({path!r}, 0)",
    "import os\nos.truncate({path!r}, 0)",
    "import os\nos.symlink('a', {path!r} + '4')",
    "import os\nos.kill(os.getppid(), 0)",
    "import os\nos.execv('/bin/true', ['true'])",
    "import os\nos.setuid(1)",
    "x = bytearray(1 << 34)",
    "x = [0]\nwhile True: x *= 2",
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "import os\nwhile True: os.write(1, b'x' * 4096)",
    "raise KeyboardInterrupt",
    "assert False",
    "not python",
)


@pytest.mark.parametrize("program", SOUND)
def test_programs_that_compute_pass(program):
    assert run_program(program) == "passed"


def test_what_is_forbidden_fails_and_changes_nothing(tmp_path):
    path = tmp_path / "kept"
    path.write_text("kept")
    for program in FORBIDDEN:
        assert run_program(program.replace("{path!r}", repr(str(path)))) != "passed", program
    assert path.read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["kept"]
    assert path.stat().st_mode & 0o777


def test_programs_that_do_not_end_are_ended(monkeypatch):
    monkeypatch.setattr(code_sandbox, "_WALL_SECONDS", 0.5)
    for program in ("while True: pass", "import time\ntime.sleep(1000)"):
        assert run_program(program).startswith("timed out")


def test_the_metric_counts_what_passes():
    programs = [["def f(): return 1", "def f(): return 2"], ["x = 1", "x = 2"]]
    scores, results = CodeEvaluation().compute(
        references=["assert f() == 1", "assert x > 0"], predictions=programs, k=[1, 2]
    )
    assert scores == {"pass@1": 0.75, "pass@2": 1.0}
    assert [entry["passed"] for _, entry in results[0]] == [True, False]
