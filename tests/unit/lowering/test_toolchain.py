import jax

from lowering.toolchain import Toolchain


def test_versions_are_those_that_are_imported():
    assert Toolchain.here("cpu").versions["jax"] == jax.__version__


def test_flags_that_change_code_are_in_the_key(monkeypatch):
    before = Toolchain.here("cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    now = Toolchain.here("cpu")
    assert now != before
    assert now.environment == {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}


def test_flags_that_only_say_where_to_look_are_not(monkeypatch):
    before = Toolchain.here("cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=somewhere")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert Toolchain.here("cpu") == before
