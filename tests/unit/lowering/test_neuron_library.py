"""AWS's library in place of neuronx-cc, as far as its interface is public."""

import hashlib
import sys
from types import ModuleType

import pytest

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron import compiler, compiler_choice, library, neff

TRN1 = Target.parse("trn1:32")
FLAGS = ["--target=trn1", "--model-type=transformer"]
COMPILER = compiler.Compiler(("neuronx-cc",), "2.27.5334.0+ab12")


class StandIn(ModuleType):
    """The one function that callers of libneuronxla use, with its signature."""

    made: object = b"NEFF"

    def neuron_xla_compile(
        self, module_bytes, compiler_flags, input_format="hlo", platform_target="trn1",
        cache_key=None, retry_failed_compilation=False, lazy=True, use_cache=True,
        cache_dir=None, work_dir=None, create_subdir=False,
    ):  # fmt: skip
        self.given = (module_bytes, compiler_flags, input_format, platform_target, cache_key)
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


@pytest.fixture
def installed(monkeypatch):
    stand_in = StandIn("libneuronxla")
    monkeypatch.setitem(sys.modules, "libneuronxla", stand_in)
    monkeypatch.setenv("GRAPHTRAIN_NEURON_COMPILER", "libneuronxla")
    return stand_in


def compile(target=TRN1):
    payload, _ = compiler_choice.compile_timed(
        COMPILER, b"module", FLAGS, graph="train", target=target
    )
    return payload


def test_the_library_is_given_the_module_under_a_key_that_is_the_same_everywhere(installed):
    assert compile() == b"NEFF"
    key = hashlib.sha256(b"module").hexdigest()[:20]
    assert installed.given == (b"module", ["--model-type=transformer"], "hlo", "trn1", key)


def test_what_the_library_raises_is_told_with_the_graph(installed):
    installed.made = OSError("NCC_EVRF004")
    with pytest.raises(LoweringError, match="did not compile train for trn1:32: OSError: NCC_EV"):
        compile()


def test_a_simulated_file_does_not_come_through_the_library(installed):
    installed.made = neff.pack({}, b"executable")
    with pytest.raises(LoweringError, match="made by the simulator"):
        compile()


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("GRAPHTRAIN_NEURON_COMPILER", "libneuronxla")
    with pytest.raises(
        LoweringError, match="libneuronxla, which is not installed on this machine; install"
    ):
        compile()


def test_the_placeholder_of_pypi_is_told_from_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "libneuronxla", ModuleType("libneuronxla"))
    with pytest.raises(LoweringError, match="is PyPI's placeholder package"):
        library.compile_through_library(b"module", FLAGS, graph="train", target=TRN1)


def test_a_compiler_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("GRAPHTRAIN_NEURON_COMPILER", "neuron")
    with pytest.raises(LoweringError, match="neither neuronx-cc nor libneuronxla"):
        compile()
