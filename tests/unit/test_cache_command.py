import importlib
import json
import os
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from in_process import graphtrain

from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.cache.stored_requests import Origin
from graphtrain.cli.cache import command
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

KEY = CacheKey.of(text="module {}")
PARTS = {"program": {}, "rules": {}, "sources": {}, "target": "cpu:8", "toolchain": {"jax": "1"}}
REQUEST = CacheKey.of(graph="train", **PARTS)
SETTINGS = {
    "model": {"layers": 2, "embed": 128, "vocab": 257, "activation": "gelu"},
    "batch": {"global_batch_size": 16, "seq_len": 64, "microbatches": 1},
    "optimizer": {"beta1": 0.9, "custom": {"name": "lion", "sources": {}}},
    "loss": {"kind": "cross_entropy"},
}
DESCRIBED = PARTS | {"program": SETTINGS, "mesh": {"data": 4, "tensor": 1}}
ALICE = Origin("examples/small.toml", "alice@host")


@pytest.fixture
def cache(tmp_path):
    cache = Cache(tmp_path / "store")
    cache.put(KEY, Artifact(bytes(18_700), {"compile_seconds": 4.2}))
    cache.record_request(REQUEST, KEY)
    return cache


@pytest.fixture
def invoke(cache):
    """A function that runs the command on the store."""

    def run(name, *arguments):
        command_line = [name, *map(str, arguments), "--cache", str(cache.root)]
        return CliRunner().invoke(command, command_line, catch_exceptions=False)

    return run


def test_ls_is_a_table_with_short_digests_and_readable_sizes(invoke):
    result = invoke("ls")
    row = result.stdout.splitlines()[2].split()
    assert row[:3] == [KEY.digest[:12], "train", "cpu:8"]
    assert row[-2].startswith("19.")
    assert row[-1] == "kB"
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stderr.startswith("1 programs, ")


def store_described(cache, number, origin=ALICE, **model):
    """Store a program of the described configuration; a number for each program."""
    program = SETTINGS | {"model": SETTINGS["model"] | model}
    key = CacheKey.of(text=number)
    parameters = {"parameters/mlp/up": {"shape": [8, 4]}, "batch/tokens": {"shape": [16, 64]}}
    cache.put(key, Artifact(bytes(900), {"inputs": parameters, "memory": {"peak": 5_000_000}}))
    request = CacheKey.of(graph=f"train{number}", **DESCRIBED | {"program": program})
    cache.record_request(request, key, origin=origin)
    return key


def test_ls_names_the_configuration_of_each_program_and_what_tells_it_from_others(cache, invoke):
    store_described(cache, 1)
    store_described(cache, 2)  # the same settings
    store_described(cache, 3, activation="swiglu")
    store_described(cache, 4, origin=Origin(), layers=1)
    lines = invoke("ls").stdout.splitlines()
    described = "examples/small.toml: 2 layers x 128, vocab 257; 16 x 64 tokens; lion; mesh data 4"
    headings = [line for line in lines[1:] if not line.startswith(" ")]
    assert sum(line.startswith(described) for line in headings) == 2
    assert "unknown configuration" in headings
    differs = [line for line in headings if line.startswith(f"{described}; model.activation")]
    assert len(differs) == 1 and len(headings) == 4
    assert "1 layer x 128, vocab 257; 16 x 64 tokens; lion; mesh data 4" in headings
    together = lines.index(next(line for line in lines if "train1" in line))
    assert any("train2" in lines[index] for index in (together - 1, together + 1))


def test_show_is_for_people(cache, invoke):
    page = invoke("show", store_described(cache, 1).digest).stdout
    facts = dict(line.split(maxsplit=1) for line in page.splitlines())
    assert facts["configuration"] == "examples/small.toml"
    assert facts["model"] == "2 layers x 128, vocab 257, 32 parameters"
    assert (facts["optimizer"], facts["mesh"]) == ("lion", "data 4")
    assert facts["compiled"].endswith("UTC, by alice@host")
    assert facts["memory"] == "5.0 MB per device at the peak"
    assert facts["used"].endswith("alice@host  examples/small.toml")  # "used by"


def test_a_request_names_the_user_who_made_it(cache, monkeypatch):
    monkeypatch.setenv("LOGNAME", "bob")
    cache.record_request(CacheKey.of(graph="init"), KEY)
    requests = {one["graph"]: one for one in cache.describe(KEY.digest)["requests"]}
    assert requests["init"]["user"] == f"bob@{os.uname().nodename}"


def test_ls_as_json_is_every_fact(invoke):
    (entry,) = json.loads(invoke("ls", "--json").stdout)
    assert entry["program"] == KEY.digest
    assert entry["requests"] == [REQUEST.digest]


@pytest.mark.parametrize("name", ["ls", "verify", "gc", "show a", "pin a", "push b", "explain c"])
def test_a_directory_that_does_not_exist_is_no_empty_store(tmp_path, name):
    outcome = graphtrain("cache", *name.split(), "--cache", tmp_path / "none")
    assert outcome.err == f"error: --cache: {tmp_path / 'none'}: no such directory\n"
    assert outcome.status == 2


def test_ls_of_no_store_prints_nothing_and_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRAPHTRAIN_CACHE", raising=False)
    outcome = graphtrain("cache", "ls")
    assert (outcome.out, outcome.err) == ("", "0 programs, 0 B, in cache\n")


def test_no_keys_are_said_to_be_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    outcome = graphtrain("cache", "key", "ls")
    assert outcome.err == "no keys; create yours with graphtrain cache key new\n"


def test_the_environment_names_the_store(cache, monkeypatch):
    monkeypatch.setenv("GRAPHTRAIN_CACHE", str(cache.root))
    assert KEY.digest[:12] in CliRunner().invoke(command, ["ls"]).stdout


def test_a_tilde_in_the_environment_is_the_home_folder(cache, monkeypatch):
    monkeypatch.setenv("HOME", str(cache.root.parent))
    monkeypatch.setenv("GRAPHTRAIN_CACHE", f"~/{cache.root.name}")
    assert KEY.digest[:12] in CliRunner().invoke(command, ["ls"]).stdout


def test_show_as_json_is_the_record(invoke):
    facts = json.loads(invoke("show", KEY.digest[:6], "--json").stdout)
    assert facts["record"] == {"compile_seconds": 4.2}
    facts = json.loads(invoke("show", REQUEST.digest[:6], "--json").stdout)
    assert facts["program"] == KEY.digest


def test_verify_says_that_all_is_sound(invoke):
    result = invoke("verify")
    assert result.stdout == ""
    assert result.stderr == "1 programs and 1 requests are intact\n"


def test_verify_fails_on_damage_and_repairs_it(invoke, cache):
    (cache.root / "v1" / "programs" / KEY.digest / "payload").write_bytes(b"")
    with pytest.raises(CacheError, match=r"unusable: 1; run: .* verify --repair"):
        invoke("verify")
    result = invoke("verify", "--repair", "--json")
    kinds = [problem["kind"] for problem in json.loads(result.stdout)["problems"]]
    assert kinds == ["damaged", "dangling"]
    assert result.stderr.endswith("2 repaired\n")


def test_gc_removes_down_to_a_size_but_what_is_kept(invoke, cache):
    assert invoke("gc", "--max-size", "1kB", "--keep", KEY.digest[:8]).stdout == ""
    result = invoke("gc", "--max-size", "1kB")
    assert result.stdout.startswith(f"removed {KEY.digest[:12]} train 19.")
    assert cache.list() == ()


def test_gc_can_tell_what_it_would_remove(invoke, cache):
    before = sorted(cache.root.rglob("*"))
    tried = invoke("gc", "--max-size", "1kB", "--dry-run")
    assert sorted(cache.root.rglob("*")) == before
    done = invoke("gc", "--max-size", "1kB")
    assert tried.stdout == done.stdout.replace("removed", "would remove")
    assert tried.stderr.replace("would remove", "removed").replace("would ", "") == done.stderr


def test_gc_refuses_what_is_no_size(invoke):
    result = invoke("gc", "--max-size", "lots")
    assert result.exit_code == 2
    assert "'lots' is not a size" in result.stderr


@pytest.fixture
def explained(invoke, monkeypatch, tmp_path):
    """A function that explains a configuration whose one request key is given."""

    importlib.import_module("graphtrain.config.load")  # its package is replaced below

    def run(key, *arguments):
        program = SimpleNamespace(program=key, run=None)
        loader = SimpleNamespace(load_config=lambda path, overrides, target: program)
        tasks = SimpleNamespace(run_requests=lambda program, *_: {"train": program})
        fallback = SimpleNamespace(fallback_programs=lambda config: {})
        resolver = SimpleNamespace(resolve=lambda program: program)
        monkeypatch.setitem(sys.modules, "graphtrain.config", loader)
        monkeypatch.setitem(sys.modules, "graphtrain.config.resolve", resolver)
        monkeypatch.setitem(sys.modules, "graphtrain.compile.tasks", tasks)
        monkeypatch.setitem(sys.modules, "graphtrain.api.checks.fallback", fallback)
        (tmp_path / "config.toml").touch()
        return invoke("explain", tmp_path / "config.toml", *arguments)

    return run


def test_explain_prints_what_changed(explained):
    result = explained(CacheKey.of(graph="train", **PARTS | {"toolchain": {"jax": "2"}}))
    assert result.stdout.splitlines()[1:] == ["  toolchain: jax 1 → 2"]


def test_explain_prints_the_first_of_many_changes(explained):
    sources = {f"{number}.py": "" for number in range(30)}
    result = explained(CacheKey.of(graph="train", **PARTS | {"sources": sources}))
    assert len(result.stdout.splitlines()) == 22
    assert result.stdout.endswith("  and 10 more\n")


def test_explain_as_json_is_by_graph(explained):
    facts = json.loads(explained(REQUEST, "--json").stdout)
    assert facts["train"]["hit"] is True
