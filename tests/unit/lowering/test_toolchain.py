import jax
import pytest

from lowering.errors import LoweringError
from lowering.machine.toolchain import Toolchain


def test_versions_are_those_that_are_imported():
    assert Toolchain.current("cpu").versions["jax"] == jax.__version__


def test_flags_that_change_code_are_in_the_key(monkeypatch):
    before = Toolchain.current("cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    now = Toolchain.current("cpu")
    assert now != before
    assert now.environment == {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}


def test_flags_that_only_say_where_to_look_are_not(monkeypatch):
    before = Toolchain.current("cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=somewhere")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert Toolchain.current("cpu") == before


def test_results_of_autotuning_are_in_the_key_by_content(monkeypatch, tmp_path):
    def told(name, content):
        (tmp_path / name).write_text(content)
        flag = f"--xla_gpu_load_autotune_results_from={tmp_path / name}"
        monkeypatch.setenv("XLA_FLAGS", flag)
        return Toolchain.current("cuda").environment

    assert told("a.textproto", "version: 3") == told("b.textproto", "version: 3")
    assert told("a.textproto", "version: 3") != told("b.textproto", "version: 4")


def test_results_of_autotuning_that_are_not_there_are_an_error(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_load_autotune_results_from=missing.textproto")
    with pytest.raises(LoweringError, match=r"cannot read missing\.textproto: No such file"):
        Toolchain.current("cuda")
