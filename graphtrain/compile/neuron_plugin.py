"""Extraction of a program's graphs into the Neuron persistent cache, by JAX's Neuron plugin."""

from collections.abc import Callable

from graphtrain.config.phases import training_phases
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.build import build_graph
from graphtrain.graphs.names import training_graphs
from lowering.neuron import plugin
from lowering.xla import backend as xla


def extract_graphs(program: ResolvedProgram, observe: Callable[[str, str], None]) -> None:
    """Trace and shard every graph for the plugin's devices, and pass it to the plugin.

    Args:
        program: the program.
        observe: called with the name and the status of each graph.

    Raises:
        LoweringError: the plugin is not installed, is not in extraction mode, or has other
            devices than the target.
        ShardingError: an array cannot be sharded.
    """
    placed_on = plugin.devices(program.target)
    for phase in training_phases(program):
        program = phase.program
        for name in training_graphs(program):
            graph = build_graph(program, name)
            lowered = xla.lower(graph, program.rules, program.mesh, program.target, placed_on)
            plugin.extract_program(lowered)
            observe(f"{phase.label} {name}".strip(), "extracted")
