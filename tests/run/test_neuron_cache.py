"""graphtrain neuron as people run it, with a compiler that does what its program says."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from places import CONFIG, ROOT

from lowering.neuron import neff
from lowering.per_device.normalize import normalize_module

REAL, SIMULATED = "neuronxcc-2.27.5334.0+ab12", "neuronxcc-0.0.0.0+simulator"
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "NeuronX Compiler version 2.27.5334.0+ab12"; exit 0; fi
program=$(cat "$3")
echo "$program" >> "$COMPILED"
case $program in
  refused*) echo "ERROR: [NCC_EVRF004] complex types"; exit 70;;
  killed*) kill -9 $$;;
  interrupted*) kill -INT $$; exit 130;;
  memory*) echo "[F137] neuronx-cc was forcibly killed - insufficient system memory"; exit 70;;
  simulated*) echo "GRAPHTRAIN SIMULATED NEFF, NOT FOR A NEURON DEVICE" > "$5"; exit 0;;
  once*) if [ $(grep -c "$program" "$COMPILED") = 1 ]; then kill -9 $$; fi;;
  slow*) echo $$ > "$COMPILED.pid"; sleep ${SLOW:-60};;
esac
echo "NEFF of $program with $*" > "$5"
"""

# Ends the process as kill -9 does, before the Nth change that it would make below a directory.
KILLED = """
import os, signal, sys
root, left = sys.argv[1], int(sys.argv[2])
def watch(event, args):
    global left
    if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
        return
    if event in ("open", "os.rename", "os.remove", "os.link", "os.utime", "os.truncate"):
        path = args[0] if isinstance(args[0], (str, bytes)) else str(args[0])
        if os.fsdecode(path).startswith(root):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
from graphtrain.cli import main
sys.argv = ["graphtrain", *sys.argv[3:]]
main()
"""

# Leaves programs in the cache as the plugin of JAX does while it extracts.
PLUGIN = """
import os, pathlib, sys
assert os.environ["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"
root = pathlib.Path(os.environ["NEURON_COMPILE_CACHE_URL"])
for name in sys.argv[1:]:
    entry = root / "neuronxcc-2.27.5334.0+ab12" / f"MODULE_{name}+e30acd3a"
    entry.mkdir(parents=True, exist_ok=True)
    (entry / "model.hlo_module.pb").write_text(name)
    (entry / "compile_flags.json").write_text('["--target=trn1"]')
    print(f"Extracting graphs ({entry / 'model.hlo_module.pb'}) for ahead-of-time compilation.")
sys.exit(3 if "fails" in sys.argv else 0)
"""


# JAX with a plugin for Neuron: shows CPU devices as its own, and puts what it is given to compile
# into the cache, as the simulator takes it.
JAX_WITH_PLUGIN = """
import hashlib, json, os, pathlib, sys
import jax
from lowering.xla import backend as xla
from lowering.neuron import compiler_flags, plugin
from lowering.per_device.normalize import normalize_module
from lowering.neuron.persistent_cache import flags
from lowering.xla.spmd_module import partition_spmd
from lowering.machine.target import Target
def put(self):
    hlo = normalize_module(partition_spmd(self).hlo, name="step", ranks=4).hlo
    written = compiler_flags.flags(Target.parse("neuron-sim:4"), compiler_flags.NEWEST_VERSION)
    name = f"MODULE_{hashlib.sha256(hlo).hexdigest()[:20]}+{flags.json_flags_key(written)}"
    root = pathlib.Path(os.environ["NEURON_COMPILE_CACHE_URL"])
    entry = root / "neuronxcc-0.0.0.0+simulator" / name
    entry.mkdir(parents=True)
    (entry / "model.hlo_module.pb").write_bytes(hlo)
    (entry / "compile_flags.json").write_text(json.dumps(written))
plugin.check_installed = lambda target: None
plugin.devices = lambda target: xla.devices(Target("cpu", (target.devices,)))
plugin.extract_program = lambda lowered: put(lowered.handle)
from graphtrain.cli import main
sys.argv = ["graphtrain", *sys.argv[1:]]
main()
"""


@dataclass(frozen=True)
class Store:
    """A cache of AWS's tools, and a machine with the compiler."""

    path: Path

    @property
    def root(self) -> Path:
        return self.path / "cache"

    def environment(self, **extra: str) -> dict[str, str]:
        search = f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        known = {"PATH": search, "PYTHONPATH": str(ROOT), "COMPILED": str(self.path / "compiled")}
        return os.environ | known | extra

    def add(self, *programs: str, compiler: str = REAL) -> None:
        """Entries whose programs are texts that say what the compiler does with them."""
        for program in programs:
            entry = self.root / compiler / f"MODULE_{program}+e30acd3a"
            entry.mkdir(parents=True)
            (entry / "model.hlo_module.pb").write_text(program)
            (entry / "compile_flags.json").write_text('["--target=trn1"]')

    def start(self, *words: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words], env=self.environment(**extra), text=True, cwd=self.path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def command(self, name: str, *words: str, status: int = 0, **extra: str) -> tuple[str, str]:
        words = ("-m", "graphtrain", "neuron", name, str(self.root), *words)
        process = self.start(*words, **extra)
        out, err = process.communicate(timeout=120)
        assert process.returncode == status, err
        return out, err

    def states(self, *words: str) -> dict[str, str]:
        """The state of every entry by its program."""
        out, _ = self.command("scan", "--json", *words)
        found = json.loads(out)
        return {each["entry"].partition("MODULE_")[2][:-9]: each["state"] for each in found}

    def entry(self, program: str) -> Path:
        return self.root / REAL / f"MODULE_{program}+e30acd3a"

    def compiled(self) -> list[str]:
        """Every program that the compiler was given, in that order."""
        return (self.path / "compiled").read_text().split()


@pytest.fixture
def store(tmp_path):
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin/neuronx-cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "cache").mkdir()
    return Store(tmp_path)


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists() and path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} does not come")


def has_ended(process: int) -> bool:
    for _ in range(600):
        if not Path(f"/proc/{process}/cmdline").exists():
            return True
        time.sleep(0.05)
    return False


def test_a_cache_is_finished_in_place_and_failures_are_told_apart(store):
    store.add(
        "one", "three-long", "refused", "killed", "interrupted", "memory", "once", "simulated"
    )
    words = ["--jobs", "2", "--report", "report.json"]
    out, err = store.command("compile", *words, status=2, NEURON_PARALLEL_COMPILE_DUMP_RESULTS="1")
    assert (
        "Current remaining items are 4, locked are 0, failed are 1, done are 3, total is 8" in out
    )
    assert "||NEURON_PARALLEL_COMPILE||: Total graphs: 8" in out
    assert "||NEURON_PARALLEL_COMPILE||: Total successful compilations: 3" in out
    assert "||NEURON_PARALLEL_COMPILE||: Total failed compilations: 5" in out
    assert "made by the simulator" in err
    written = json.loads((store.path / "report.json").read_text())
    assert written["compilation_summary"] == {"true": 3, "false": 5}
    graphs = {Path(path).parent.name[7:-9]: each for path, each in
              written["compilation_report"].items()}  # fmt: skip
    kinds = {name: each["failure"] for name, each in graphs.items() if not each["status"]}
    assert kinds == {
        "refused": "refused", "killed": "killed", "interrupted": "interrupted",
        "memory": "killed", "simulated": "not stored",
    }  # fmt: skip
    assert (graphs["once"]["status"], graphs["once"]["retry"]) == (True, 1)
    assert len(list(store.path.glob("*neuron_parallel_compile_results_*.json"))) == 2

    one = store.entry("one")
    assert {path.name for path in one.iterdir()} == {
        "compile_flags.json", "model.done", "model.hlo_module.pb", "model.neff",
    }  # fmt: skip
    assert (one / "model.done").stat().st_size == 0
    assert "--target=trn1 --verbose=35" in (one / "model.neff").read_text()
    failed = [path.parent.name for path in store.root.rglob("model.log")]
    assert failed == ["MODULE_refused+e30acd3a"]
    assert store.compiled()[0] in ("three-long", "interrupted")  # the two largest begin

    store.command("compile", status=2)
    assert store.compiled().count("refused") == 1
    assert store.compiled().count("one") == 1
    store.command("compile", "--retry-failed", "--retries", "0", status=2)
    assert store.compiled().count("refused") == 2


def test_an_entry_is_compiled_only_where_its_own_compiler_is(store):
    store.add("old", compiler="neuronxcc-2.21.33363.0+82129205")
    _, err = store.command("compile", status=2)
    assert "need another one: 1 of neuronxcc-2.21.33363.0+82129205; install one of these" in err
    store.add("new")
    _, err = store.command("compile")
    assert "of other compilers: 1 of neuronxcc-2.21.33363.0+82129205" in err
    assert store.states() == {"old": "not compiled", "new": "done"}
    (store.path / "bin/neuronx-cc").unlink()
    _, err = store.command("compile", status=2)
    assert "neuronx-cc is not installed on this machine; install it" in err


def test_flags_without_a_machine_need_one(store):
    store.add("one")
    (store.entry("one") / "compile_flags.json").write_text("[]")
    _, err = store.command("compile", status=2)
    assert "its flags contain no --target; pass one with --target" in err
    assert "its flags do not match the flags key in its name" in err
    (store.entry("one") / "model.hlo_module.pb").rename(
        store.entry("one") / "model.hlo_module.pb.gz"
    )
    _, err = store.command("compile", "--target", "trn1n", status=2)
    assert "not started: Not a gzipped file" in err
    (store.entry("one") / "model.hlo_module.pb.gz").rename(
        store.entry("one") / "model.hlo_module.pb"
    )
    store.command("compile", "--target", "trn1n")
    assert "--target=trn1n" in (store.entry("one") / "model.neff").read_text()


def test_locks_of_the_living_are_honoured_and_others_are_removed(store):
    store.add("one", "two")
    lock = store.entry("one") / "model.hlo_module.pb.lock"
    lock.touch()
    _, err = store.command("compile")
    assert "MODULE_one+e30acd3a: skipped, locked by another tool, 0 minutes ago" in err
    assert store.states() == {"one": "locked", "two": "done"}
    out, _ = store.command("clean-locks")
    assert out.startswith("kept ") and lock.exists()
    past = time.time() - 7 * 3600
    os.utime(lock, (past, past))
    assert store.states()["one"] == "stale lock"
    out, _ = store.command("clean-locks")
    assert out.startswith("removed ") and not lock.exists()
    lock.touch()
    out, _ = store.command("clean-locks", "--force")
    assert out.startswith("removed ") and not lock.exists()
    lock.touch()
    os.utime(lock, (past, past))
    store.command("compile")
    assert store.states() == {"one": "done", "two": "done"}


def test_two_at_once_compile_every_entry_once(store):
    store.add(*(f"program{number}" for number in range(8)))
    words = [
        "-m",
        "graphtrain",
        "neuron",
        "compile",
        str(store.root),
        "--jobs",
        "2",
        "--wait",
    ]
    both = [store.start(*words), store.start(*words)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert sorted(store.compiled()) == [f"program{number}" for number in range(8)]
    assert set(store.states().values()) == {"done"}


def test_a_killed_run_takes_its_compilers_along_and_the_next_finishes(store):
    store.add("slow", "one")
    words = ["-m", "graphtrain", "neuron", "compile", str(store.root), "--jobs", "2"]
    process = store.start(*words)
    wait_for(store.path / "compiled.pid")
    wait_for(store.entry("one") / "model.neff")
    compiler = int((store.path / "compiled.pid").read_text())
    assert store.states()["slow"] == "locked"
    process.kill()
    process.communicate()
    assert has_ended(compiler)
    assert store.states() == {"slow": "stale lock", "one": "done"}
    store.command("compile", SLOW="0")
    assert store.states() == {"slow": "done", "one": "done"}
    assert not list(store.root.rglob("*e30acd3a/*.lock"))


def test_an_interrupted_run_gives_its_locks_back_and_marks_no_failure(store):
    store.add("slow")
    words = ["-m", "graphtrain", "neuron", "compile", str(store.root)]
    process = store.start(*words)
    wait_for(store.path / "compiled.pid")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert has_ended(int((store.path / "compiled.pid").read_text()))
    assert store.states() == {"slow": "not compiled"}
    assert not list(store.entry("slow").glob("model.log"))


def test_a_compiler_that_takes_too_long_is_stopped(store):
    store.add("slow")
    _, err = store.command("compile", "--timeout", "0.5", status=2)
    assert "timed out: not compiled within 0.5 s" in err
    assert store.states() == {"slow": "not compiled"}


def test_a_run_killed_before_any_change_leaves_what_the_next_finishes(store):
    entry = store.entry("one")
    for number in range(1, 100):
        for path in entry.glob("*"):
            path.unlink()
        entry.mkdir(parents=True, exist_ok=True)
        (entry / "model.hlo_module.pb").write_text("one")
        (entry / "compile_flags.json").write_text('["--target=trn1"]')
        (entry / "model.neff").write_text("half a NE")  # what an older tool's death has left
        words = [str(store.root), str(number), "neuron", "compile", str(store.root)]
        process = store.start("-c", KILLED, *words)
        process.communicate(timeout=60)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        if (entry / "model.done").exists():
            assert (entry / "model.neff").read_text().startswith("NEFF of one with compile")
        store.command("compile")
        assert {path.name for path in entry.iterdir()} == {
            "compile_flags.json", "model.done", "model.hlo_module.pb", "model.neff",
        }  # fmt: skip
    assert number > 10  # there are as many changes at least


def test_the_simulator_finishes_what_is_its_own(store):
    def step(x):
        return (jnp.sin(x) @ x,)

    lowered = jax.jit(step).lower(jnp.ones((8, 8)))
    hlo = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    store.add("sound", "broken", compiler=SIMULATED)
    sound, broken = (store.root / SIMULATED / f"MODULE_{n}+e30acd3a" for n in ("sound", "broken"))
    (sound / "model.hlo_module.pb").write_bytes(normalize_module(hlo, name="step", ranks=1).hlo)
    store.add("real")
    _, err = store.command("compile", "--simulator", status=2)
    assert f"of other compilers: 1 of {REAL}" in err
    assert store.states() == {"real": "not compiled", "sound": "done", "broken": "not compiled"}
    assert neff.is_simulated((sound / "model.neff").read_bytes())
    assert "bytes are not an HloModuleProto" in (broken / "graphtrain.log").read_text()
    out, _ = store.command("analyze")
    assert f"{SIMULATED}: 1 not compiled, 1 done" in out


def test_what_a_plugin_extracts_is_compiled_where_it_appeared(store):
    (store.path / "train.py").write_text(PLUGIN)
    _, err = store.command("collect", "--jobs", "2", "--", sys.executable, "train.py", "a", "b")
    assert "extracted 2 new programs" in err
    assert store.states() == {"a": "done", "b": "done"}
    _, err = store.command("collect", "--no-compile", "--", sys.executable, "train.py", "c")
    assert store.states() == {"a": "done", "b": "done", "c": "not compiled"}
    fails = ["--", sys.executable, "train.py", "fails"]
    _, err = store.command("collect", *fails, status=2)
    assert "exited with status 3 while its graphs were extracted" in err
    assert store.states()["fails"] == "not compiled"
    store.command("collect", *fails, NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE="1")
    assert set(store.states().values()) == {"done"}


def test_the_graphs_of_a_run_go_through_a_plugin_and_the_compiler(store):
    (store.path / "config.toml").write_text(CONFIG)
    (store.path / "plugin.py").write_text(JAX_WITH_PLUGIN)
    extract = [sys.executable, "plugin.py", "neuron", "extract", "config.toml"]
    place = ["--target", "trn1:4", "--set", "program.mesh.data=2", "--set", "program.mesh.tensor=2"]
    out, err = store.command("collect", "--simulator", "--jobs", "2", "--", *extract, *place)
    assert "train: extracted" in err
    assert "extracted 3 new programs" in err
    assert "Total successful compilations: 3" in out
    assert list(store.states().values()) == ["done"] * 3
    for made in store.root.rglob("model.neff"):
        assert neff.unpack(made.read_bytes())[0]["ranks"] == 4


def test_a_command_that_uses_no_plugin_is_found_out(store):
    _, err = store.command("collect", "--", "true", status=2)
    assert "true succeeded but extracted no program" in err
    (store.path / "config.toml").write_text(CONFIG)
    extract = [sys.executable, "-m", "graphtrain", "neuron", "extract", "config.toml"]
    _, err = store.command("collect", "--", *extract, "--target", "trn1:4", status=2)
    assert "JAX's Neuron plugin is not installed on this machine; install jax-neuronx" in err
    _, err = store.command("collect", "--", *extract, status=2)
    assert "cpu:1 has no Neuron plugin; name a target such as trn1:32" in err
