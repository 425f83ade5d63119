"""Entries, flags, locks and failures of AWS's persistent cache; nothing here compiles."""

import errno
import fcntl
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron import neff, plugin
from lowering.neuron.compiler import Compiler
from lowering.neuron.persistent_cache import (
    analysis,
    completion,
    entries,
    failures,
    flags,
    locks,
    report,
)
from lowering.neuron.persistent_cache.compilation import (
    CompileOptions,
    EntryOutcome,
    compile_entries,
)
from lowering.neuron.persistent_cache.failures import CompileFailure, classify
from lowering.neuron.persistent_cache.finishing import FinishReport

COMPILER = "neuronxcc-2.21.33363.0+82129205"
NAME = "MODULE_10065576681553525797+e30acd3a"
HOURS = 3600.0
ALL = {"model.hlo_module.pb": "hlo", "compile_flags.json": '["--target=trn1"]'}
DONE = ALL | {"model.neff": "NEFF", "model.done": ""}


@pytest.fixture
def entry(tmp_path):
    """Make an entry of some files in a cache; return its directory."""

    def make(files: dict[str, str], name: str = NAME, compiler: str = COMPILER) -> Path:
        directory = tmp_path / compiler / name
        directory.mkdir(parents=True)
        for file, content in files.items():
            (directory / file).write_text(content)
        return directory

    return make


def state(directory: Path, stale_after: float = 6 * HOURS) -> tuple[str, str]:
    found = entries.read(directory, locks.LockChecker(stale_after))
    return found.state, found.reason


# The keys of entries that Hugging Face and AWS have published, with the sizes of their flags files.
PUBLISHED = [
    ([], 2, "d7517139"),
    (["--target=trn1"], 17, "e30acd3a"),
    (["--model-type=transformer", "--auto-cast=none"], 48, "d7cde3b5"),
    (
        ["--model-type=transformer", "--auto-cast=none", "--execute-repetition=1"],
        74,
        "39f12043",
    ),
    (
        ["--target=trn1", "--model-type=transformer", "--auto-cast=none", "--execute-repetition=1"],
        91,
        "613edded",
    ),
]
PUBLISHED_AS_TEXT = [
    ([], "d41d8cd9"),
    (["--model-type=transformer"], "abb26765"),
    (["--model-type=transformer", "--auto-cast=none"], "2c2d707e"),
    (["-O2", "--model-type=transformer"], "6bd63055"),
]


@pytest.mark.parametrize(("chosen", "size", "key"), PUBLISHED)
def test_published_keys_of_flags_are_reproduced(chosen, size, key):
    assert len(json.dumps(chosen)) == size
    assert flags.json_flags_key(chosen) == key
    assert flags.match_key(f"MODULE_1+{key}", chosen)


@pytest.mark.parametrize(("chosen", "key"), PUBLISHED_AS_TEXT)
def test_keys_of_older_tools_are_reproduced(chosen, key):
    assert flags.text_flags_key(chosen) == key
    assert flags.match_key(f"MODULE_1+{key}", chosen)
    assert not flags.match_key(f"MODULE_1+{key}", [*chosen, "--fast"])


def test_flags_are_read_from_files_of_both_ages(entry):
    new = entry({"compile_flags.json": '["--target", "trn2", "-O1"]'}, "MODULE_1+a")
    old = entry({"compile_flags.txt": "--model-type=transformer -O1"}, "MODULE_2+b")
    assert flags.target_flag(flags.read(new)) == "trn2"
    assert flags.read(old) == ["--model-type=transformer", "-O1"]
    assert flags.target_flag(flags.read(old)) is None


@pytest.mark.parametrize("content", ['{"flags": 1}', '["--tar', "[1]"])
def test_flags_that_are_no_list_are_refused(entry, content):
    with pytest.raises(LoweringError, match=r"compile_flags\.json is not a JSON list of flags"):
        flags.read(entry({"compile_flags.json": content}))


def test_a_line_of_flags_with_half_a_quotation_is_refused(entry):
    with pytest.raises(LoweringError, match=r"flags\.txt is not a line of flags: No closing"):
        flags.read(entry({"compile_flags.txt": "--model-type='transformer"}))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (DONE, ("done", "")),
        (ALL, ("not compiled", "")),
        (ALL | {"model.log": "[NCC_EVRF004] c64"}, ("failed", "refused: NCC_EVRF004 c64")),
        (ALL | {"model.log": "KeyboardInterrupt"}, ("failed", "interrupted: KeyboardInterrupt")),
        (ALL | {"model.neff": "NEFF"}, ("incomplete", "model.neff without model.done")),
        (ALL | {"model.done": ""}, ("incomplete", "model.done without model.neff")),
        ({"compile_flags.json": "[]"}, ("incomplete", "no program")),
        (ALL | {"model.hlo_module.pb": ""}, ("incomplete", "no program")),
        ({"model.hlo_module.pb": "hlo"}, ("incomplete", "no compile_flags.json")),
        (ALL | {"graphtrain.log": "x\n\nkilled: it"}, ("not compiled", "killed: it")),
    ],
)
def test_an_entry_is_what_its_files_say(entry, files, expected):
    assert state(entry(files)) == expected


def test_a_simulated_neff_among_a_real_compilers_is_not_done(entry):
    simulated = DONE | {"model.neff": neff.pack({}, b"executable").decode()}
    assert state(entry(simulated))[0] == "incomplete"
    assert "made by the simulator" in state(entry(simulated, "MODULE_2+a"))[1]
    assert state(entry(simulated, compiler="neuronxcc-0.0.0.0+simulator")) == ("done", "")
    assert state(entry(DONE | {"model.neff": ""}, "MODULE_3+a"))[0] == "incomplete"


def test_programs_of_all_ages_are_found_and_unpacked(entry, tmp_path):
    old = entry({"model.hlo.pb": "hlo", "compile_flags.txt": ""}, "MODULE_1+d41d8cd9")
    packed = entry({"compile_flags.json": "[]"}, "MODULE_2+d7517139")
    (packed / "model.hlo_module.pb.gz").write_bytes(gzip.compress(b"hlo"))
    for directory, name in (
        (old, "model.MODULE_1+d41d8cd9.hlo.pb"),
        (packed, "model.MODULE_2+d7517139.hlo_module.pb"),
    ):
        assert state(directory) == ("not compiled", "")
        program = entries.read(directory, None).program
        copy = completion.decompress_program(program, tmp_path)
        assert (copy.name, copy.read_bytes()) == (name, b"hlo")


def test_a_lock_of_another_tool_is_live_until_it_is_old(entry):
    directory = entry(ALL | {"model.hlo_module.pb.lock": ""})
    assert state(directory) == ("locked", "another tool, 0 minutes ago")
    assert state(directory, stale_after=0) == ("stale lock", "another tool, 0 minutes ago")
    past = time.time() - 7 * HOURS
    os.utime(directory / "model.hlo_module.pb.lock", (past, past))
    assert state(directory) == ("stale lock", "another tool, 420 minutes ago")


def test_an_old_lock_is_live_while_a_compiler_here_has_the_entry(entry):
    directory = entry(ALL | {"model.hlo_module.pb.lock": ""})
    words = ["neuronx-cc", "compile", f"/tmp/model.{NAME}.hlo_module.pb"]
    compiler = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert compiler.stdout is not None
        compiler.stdout.readline()  # its command line is there only once it has begun
        assert state(directory, stale_after=0) == ("locked", "a neuronx-cc on this machine")
    finally:
        compiler.communicate()
    assert state(directory, stale_after=0)[0] == "stale lock"


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def own_as(path: Path, pid: int) -> None:
    """Let a lock of this process be one of another on this host."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": pid}))


@pytest.fixture(params=["ENOLCK", "ENOSYS"])
def no_flock(request, monkeypatch):
    def refuse(*arguments):
        raise OSError(getattr(errno, request.param), "no locks on this file system")

    for function in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, function, refuse)


def test_without_flock_a_living_owner_keeps_its_lock_and_a_dead_one_loses_it(
    entry, tmp_path, no_flock
):
    directory = entry(ALL)
    path = directory / "model.hlo_module.pb.lock"
    assert isinstance(locks.acquire(path, tmp_path, locks.LockChecker(HOURS)), locks.HeldLock)
    os.utime(path, (0, 0))  # its owner is busy; the kernel knows that it lives
    refused = locks.acquire(path, tmp_path, locks.LockChecker(HOURS))
    assert isinstance(refused, locks.Lock) and refused.is_live
    assert f"process {os.getpid()} on {os.uname().nodename}, since " in refused.owner
    own_as(path, ended_process())
    assert state(directory)[0] == "stale lock"
    assert isinstance(locks.acquire(path, tmp_path, locks.LockChecker(HOURS)), locks.HeldLock)


def test_a_lock_of_ours_is_live_as_long_as_its_maker(entry, tmp_path):
    directory = entry(ALL)
    path = directory / "model.hlo_module.pb.lock"
    held = locks.acquire(path, tmp_path, locks.LockChecker(HOURS))
    assert isinstance(held, locks.HeldLock)
    os.utime(path, (0, 0))
    assert state(directory, stale_after=0)[0] == "locked"
    held.touch()
    assert path.stat().st_mtime > time.time() - 60
    assert isinstance(locks.acquire(path, tmp_path, locks.LockChecker(0)), locks.Lock)
    os.close(held.descriptor)
    own_as(path, ended_process())
    assert state(directory)[0] == "stale lock"
    again = locks.acquire(path, tmp_path, locks.LockChecker(HOURS))
    assert isinstance(again, locks.HeldLock)
    again.release()
    assert state(directory) == ("not compiled", "")


def test_a_lock_of_ours_on_another_host_is_live_while_it_is_touched(entry):
    owner = {"tool": "graphtrain", "host": "elsewhere", "pid": 1, "boot": "b", "since": "noon"}
    directory = entry(ALL | {"model.hlo_module.pb.lock": json.dumps(owner)})
    said = "graphtrain, process 1 on elsewhere, since noon, last heartbeat 0 s ago"
    assert state(directory) == ("locked", said)
    past = time.time() - 700
    os.utime(directory / "model.hlo_module.pb.lock", (past, past))
    assert state(directory)[0] == "stale lock"


def test_a_lock_that_was_taken_over_by_force_is_not_given_back(entry, tmp_path):
    path = entry(ALL) / "model.hlo_module.pb.lock"
    judge = locks.LockChecker(HOURS)
    first = locks.acquire(path, tmp_path, judge)
    assert isinstance(first, locks.HeldLock)
    assert locks.remove_stale([locks.Lock(path, False, "")], tmp_path, judge, force=False) == []
    assert len(locks.remove_stale([locks.Lock(path, True, "")], tmp_path, judge, force=True)) == 1
    second = locks.acquire(path, tmp_path, judge)
    assert isinstance(second, locks.HeldLock)
    first.release()
    assert path.exists()
    second.release()
    assert not path.exists()


@pytest.mark.parametrize(
    ("status", "log", "kind"),
    [
        (70, "ERROR: [NCC_EVRF004] complex types", "refused"),
        (70, "[NCC_EOOM001] needs 21 GB", "out of memory"),
        (1, "MemoryError", "out of memory"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'", "out of memory"),
        (-9, "", "killed"),
        (137, "", "killed"),
        (70, "[F137] neuronx-cc was forcibly killed", "killed"),
        (-2, "", "interrupted"),
        (143, "[NCC_EVRF004] said before", "interrupted"),
        (1, "Traceback\nKeyboardInterrupt", "interrupted"),
        (127, "libxml2.so.2: cannot open shared object file", "crashed"),
        (70, "", "crashed"),
        (70, "[F134] neuronx-cc terminated abnormally\n[NCC_EVRF004] x", "crashed"),
        (70, "[NCC_INKI016] internal", "crashed"),
    ],
)
def test_a_failure_is_the_programs_only_with_the_compilers_own_code(status, log, kind):
    found = classify(status, log)
    assert found.kind == kind
    assert found.is_final == (kind == "refused")


def test_what_memory_may_have_ended_is_tried_again_and_a_device_too_small_is_not():
    assert classify(-9, "").is_chance
    assert classify(1, "MemoryError").is_chance
    assert not classify(70, "[NCC_EOOM001] needs 21 GB").is_chance
    assert not classify(-2, "").is_chance


@pytest.mark.parametrize("kind", ["out of memory", "killed", "interrupted", "timed out", "crashed"])
def test_only_refusals_are_left_to_aws_tools_as_failures(entry, tmp_path, kind):
    directory = entry(DONE | {"model.log": "an older one"})
    log = tmp_path / "log.txt"
    log.write_text("what it said")
    completion.fail(directory, log, CompileFailure(kind, "why"))
    assert state(directory) == ("not compiled", f"{kind}: why")
    assert sorted(path.name for path in directory.iterdir()) == [
        "compile_flags.json", "graphtrain.log", "model.hlo_module.pb",
    ]  # fmt: skip
    completion.fail(directory, log, CompileFailure("refused", "why"))
    assert state(directory)[0] == "failed"
    assert not (directory / "graphtrain.log").exists()
    assert (directory / "model.log").read_text() == "what it said"


def test_a_completed_entry_has_nothing_left_of_earlier_attempts(entry, tmp_path):
    directory = entry(ALL | {"model.log": "x", "graphtrain.log": "y", ".graphtrain-host-1-z": "z"})
    made = tmp_path / "made.neff"
    made.write_text("NEFF")
    completion.complete(directory, made)
    assert state(directory) == ("done", "")
    assert {path.name for path in directory.iterdir()} == set(DONE)


def test_what_the_simulator_made_never_enters_a_real_compilers_directory(entry, tmp_path):
    directory = entry(ALL)
    made = tmp_path / "made.neff"
    made.write_bytes(neff.pack({}, b"executable"))
    with pytest.raises(LoweringError, match="made by the simulator"):
        completion.complete(directory, made)
    assert {path.name for path in directory.iterdir()} == set(ALL)


def test_a_full_disk_changes_nothing_in_an_entry(entry, tmp_path, monkeypatch):
    directory = entry(ALL | {"model.log": "x"})
    made = tmp_path / "made.neff"
    made.write_text("NEFF")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(completion.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        completion.complete(directory, made)
    assert {path.name for path in directory.iterdir()} == {*ALL, "model.log"}


def test_the_report_has_the_fields_of_aws_tool():
    outcomes = (
        EntryOutcome(Path("/c/a/model.hlo_module.pb"), "compiled", 1, 2.0),
        EntryOutcome(
            Path("/c/b/model.hlo_module.pb"), "failed", 2, 3.0, CompileFailure("killed", "why")
        ),
        EntryOutcome(Path("/c/d/model.hlo_module.pb"), "locked", 0, 0.0),
    )
    written = report.as_json(FinishReport(outcomes, 100.0, 5.0))
    assert written == {
        "compilation_summary": {"true": 1, "false": 1},
        "compilation_report": {
            "/c/a/model.hlo_module.pb": {"status": True, "retry": 0, "compile_time": 2.0},
            "/c/b/model.hlo_module.pb": {
                "status": False, "retry": 1, "compile_time": 3.0,
                "failure": "killed", "error": "why",
            },
        },
        "start_time": 100.0,
        "compilation_time": 5.0,
    }  # fmt: skip
    ends = [line.partition("  INFO ||NEURON_PARALLEL_COMPILE||: ")[2] for line in
            report.summary_lines(outcomes)]  # fmt: skip
    assert ends == [
        "Total graphs: 2",
        "Total successful compilations: 1",
        "Total failed compilations: 1",
    ]


def test_the_analysis_counts_and_names_what_is_wrong(entry, tmp_path):
    entry(DONE)
    entry(ALL, "MODULE_2+00000000")
    entry(ALL | {"model.log": "[NCC_EVRF004] complex"}, "MODULE_3+e30acd3a")
    found = analysis.summarise(entries.scan(tmp_path, locks.LockChecker(HOURS)))
    assert found["compilers"][COMPILER]["states"] == {"done": 1, "not compiled": 1, "failed": 1}
    assert found["flags"]["e30acd3a"] == {"entries": 2, "flags": ["--target=trn1"]}
    assert (found["failures"], found["codes"]) == ({"refused": 1}, {"NCC_EVRF004": 1})
    said = [each["problem"] for each in found["problems"] if "MODULE_2" in each["entry"]]
    assert said[0] == "its flags do not match the flags key in its name"
    assert "bytes are not an HloModuleProto" in said[1]


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: data[:12] + b"\xff" * 9])
def test_a_damaged_program_is_a_line_of_the_analysis(entry, tmp_path, damage):
    directory = entry({"compile_flags.json": "[]"}, "MODULE_2+d7517139")
    packed = damage(gzip.compress(bytes(range(256))))
    (directory / "model.hlo_module.pb.gz").write_bytes(packed)
    found = analysis.summarise(entries.scan(tmp_path, locks.LockChecker(HOURS)))
    assert len(found["problems"]) == 1


@pytest.mark.parametrize("flag", ["--cache_dir=/elsewhere", "--no_cache"])
def test_an_extraction_does_not_end_up_in_another_cache(monkeypatch, tmp_path, flag):
    monkeypatch.setenv("NEURON_CC_FLAGS", f"--model-type=transformer {flag}")
    with pytest.raises(LoweringError, match=rf"NEURON_CC_FLAGS contains {flag}.*remove it"):
        plugin.extraction_environment(tmp_path)


def test_an_extraction_is_told_the_cache_and_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type=transformer")
    told = plugin.extraction_environment(tmp_path)
    assert told["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"
    assert told["NEURON_COMPILE_CACHE_URL"] == str(tmp_path)
    assert told["NEURON_CC_FLAGS"] == "--model-type=transformer"


def test_without_the_plugin_the_error_says_what_to_install():
    with pytest.raises(LoweringError, match="install jax-neuronx and libneuronxla"):
        plugin.check_installed(Target.parse("trn1:32"))


def test_every_kind_of_failure_is_read_back():
    for kind in ("killed", "timed out", "not stored"):
        assert failures.parse_failure(f"{kind}: a: b") == CompileFailure(kind, "a: b")


def lock_of(directory: Path) -> Path:
    return directory / "model.hlo_module.pb.lock"


def test_an_observer_that_fails_leaves_neither_a_compiler_nor_a_lock(entry, tmp_path, monkeypatch):
    """As a progress line on a full disk or a closed pipe; the compiler runs by then."""
    monkeypatch.setattr(completion, "decompress_program", lambda program, scratch: program)
    directory = entry(ALL)
    released = []
    release = locks.HeldLock.release
    monkeypatch.setattr(
        locks.HeldLock, "release", lambda lock: (released.append(lock), release(lock))
    )

    def fail(name: str, stage: str) -> None:
        assert lock_of(directory).exists()
        raise OSError(errno.EPIPE, "closed")

    compiler = Compiler(("sleep", "60"), "2.21")
    unfinished = [entries.read(directory, judge=None)]
    with pytest.raises(OSError, match="closed"):
        compile_entries(unfinished, tmp_path, compiler, CompileOptions(jobs=1), fail)
    assert len(released) == 1 and not lock_of(directory).exists()


def test_a_compiler_that_does_not_start_leaves_no_open_log(entry, tmp_path, monkeypatch):
    monkeypatch.setattr(completion, "decompress_program", lambda program, scratch: program)
    directory, open_logs = entry(ALL), []

    def refuse(*arguments, stdout, **options):
        open_logs.append(stdout)
        raise OSError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    unfinished = [entries.read(directory, judge=None)]
    (outcome,) = compile_entries(
        unfinished, tmp_path, Compiler(("sleep",), "2.21"), CompileOptions()
    )
    assert outcome.failure.kind == "not started" and [log.closed for log in open_logs] == [True]
    assert not lock_of(directory).exists()
