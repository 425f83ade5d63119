"""Code of a model computes and reads files, and can do nothing else."""

import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor

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
    "import os\nos.write(1, b'beside')",
    "def f(x): return x\nassert f('\u00e9') == chr(233)",
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
    # Processes and threads
    "import os\nos.forkpty()",
    "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "import ctypes\nassert ctypes.CDLL(None).syscall(56, 0, 0, 0, 0, 0) == 0",  # clone
    "import ctypes\nassert ctypes.CDLL(None).syscall(435, 0, 0) == 0",  # clone3
    "import concurrent.futures as f\nf.ThreadPoolExecutor().submit(print).result()",
    "import signal, os\nos.kill(0, signal.SIGKILL)",
    "import signal\nsignal.alarm(1)\nassert signal.alarm(0) == 1",
    "import signal\nsignal.pthread_kill(1, 9)",
    "import os\nos.killpg(os.getpgid(0), 9)",
    "import ctypes\nassert ctypes.CDLL(None).ptrace(16, {parent}, 0, 0) == 0",
    "import os\nassert os.nice(-5)",
    # Files
    "import tempfile\ntempfile.TemporaryFile()",
    "import shutil\nshutil.rmtree({path!r} + '/..')\nraise SystemExit",
    "import os\nos.link({path!r}, {path!r} + '5')",
    "import os\nos.chdir('/')\nopen('tmp/written', 'w')",
    "import os\nos.chroot('/')",
    "import os\nos.mkfifo({path!r} + '6')",
    "import os\nos.utime({path!r}, (0, 0))",
    "import os\nos.memfd_create('a')",
    "import os, ctypes\nf = os.open({path!r}, os.O_RDONLY)\n"
    "assert ctypes.CDLL(None).ftruncate(f, 0) == 0",
    "import mmap, os\nf = os.open({path!r}, os.O_RDWR)\nmmap.mmap(f, 4)",
    "open('/proc/self/mem', 'r+b')",
    "import sqlite3\nsqlite3.connect({path!r} + '7').execute('create table a (b)')",
    # Network
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
    "import socket\nsocket.getaddrinfo('localhost', 80)\nsocket.socketpair()",
    "import asyncio\nasyncio.run(asyncio.open_connection('127.0.0.1', 9))",
    "secret = open({path!r}).read()\nimport http.client\n"
    "http.client.HTTPConnection('127.0.0.1', 9).request('POST', '/', secret)",
    # Memory, time and output
    "def f(): return f()\nf()",
    "import ctypes\nctypes.string_at(0)",
    "x = 'x' * (1 << 31)",
    "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "import os\nos.write(1, b'x' * (1 << 20))\nraise ValueError",
    # Results that are not the program's to give
    "print('passed')\nraise ValueError",
    "import os\nos.write(1, b'passed')\nos._exit(0)",
    "import os\nos.close(1)",
    "import atexit, os\natexit.register(os.write, 1, b'passed')\nassert False",
    "import os, sys\nframe = sys._getframe()\nfound = []\n"
    "while frame:\n    found += map(str, frame.f_locals.values())\n    frame = frame.f_back\n"
    "os.write(1, b'\\n' + b'\\n'.join(f'passed {one}'.encode() for one in found))\nos._exit(0)",
    "import gc, os\nfor one in gc.get_objects():\n"
    "    if isinstance(one, dict):\n        for value in list(one.values()):\n"
    "            if isinstance(value, str) and len(value) == 32:\n"
    "                os.write(1, b'\\npassed ' + value.encode())\nos._exit(0)",
    "import os\nos.write(1, b'\\npassed ' + os.read(0, 64))\nos._exit(0)",
    "import sys, os\nsys.exit = lambda *a: None\nos._exit = lambda *a: None\nassert False",
    "import sys\nsys.modules['__main__'].main = print\nraise SystemExit(0)",
)


@pytest.mark.parametrize("program", SOUND)
def test_programs_that_compute_pass(program):
    assert run_program(program) == "passed"


def test_what_is_forbidden_fails_and_changes_nothing(tmp_path):
    path = tmp_path / "kept"
    path.write_text("kept")
    assert len(FORBIDDEN) > 50
    with ThreadPoolExecutor(4) as pool:
        given = [
            program.replace("{path!r}", repr(str(path))).replace("{parent}", str(os.getpid()))
            for program in FORBIDDEN
        ]
        for program, report in zip(given, pool.map(run_program, given), strict=True):
            assert report != "passed", program
    assert path.read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["kept"]
    assert path.stat().st_mode & 0o777


def test_programs_that_do_not_end_are_ended(monkeypatch):
    monkeypatch.setattr(code_sandbox, "_WALL_SECONDS", 0.5)
    for program in ("while True: pass", "import time\ntime.sleep(1000)"):
        assert run_program(program).startswith("timed out")


def test_a_program_that_sleeps_is_ended_as_one_that_computes(monkeypatch):
    monkeypatch.setattr(code_sandbox, "_OWN_SECONDS", 0.7)
    began = time.monotonic()
    assert run_program("import time\ntime.sleep(20)").startswith("timed out")
    assert time.monotonic() - began < 15  # however busy the machine is


def test_the_metric_counts_what_passes():
    programs = [["def f(): return 1", "def f(): return 2"], ["x = 1", "x = 2"]]
    scores, results = CodeEvaluation().compute(
        references=["assert f() == 1", "assert x > 0"], predictions=programs, k=[1, 2]
    )
    assert scores == {"pass@1": 0.75, "pass@2": 1.0}
    assert [entry["passed"] for _, entry in results[0]] == [True, False]
