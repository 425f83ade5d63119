"""What a run gives to JAX's plugin for Neuron; CPU devices stand in for the plugin's."""

import jax
import pytest
from programs import CUBE, program

from graphtrain.compile.neuron_plugin import extract_graphs
from graphtrain.config.resolve import resolve
from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron import plugin

OF = program(**(CUBE | {"target": "trn1:8"}))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(plugin, "devices", lambda target: jax.devices()[: target.devices])


def test_every_graph_of_a_run_is_given_to_the_plugin_while_it_extracts(installed, monkeypatch):
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    compiled, said = [], []
    compile = jax.stages.Lowered.compile

    def spy(self):
        compiled.append(compile(self))

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    extract_graphs(resolve(OF), lambda graph, stage: said.append((graph, stage)))
    assert said == [(graph, "extracted") for graph in ("init", "train", "evaluate")]
    assert len(compiled) == 3
    for each in compiled:
        assert len(each.runtime_executable().local_devices()) == 8


def test_a_plugin_that_would_compile_is_given_nothing(installed, monkeypatch):
    monkeypatch.delenv("NEURON_EXTRACT_GRAPHS_ONLY", raising=False)
    with pytest.raises(LoweringError, match="run this command through graphtrain neuron collect"):
        extract_graphs(resolve(OF), lambda graph, stage: None)


def test_devices_without_a_plugin_are_refused():
    with pytest.raises(
        LoweringError, match="is not installed on this machine; install jax-neuronx"
    ):
        plugin.devices(Target.parse("trn1:8"))
