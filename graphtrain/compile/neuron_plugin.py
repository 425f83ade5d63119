"""Every graph of a run into JAX's plugin for Neuron, which leaves them in AWS's cache."""

from collections.abc import Callable

from graphtrain.compile.request_keys import GRAPHS
from graphtrain.config.resolve import mesh_shape
from graphtrain.config.schema import Program
from graphtrain.graphs.build import build_graph
from lowering.machine.target import Target
from lowering.neuron import plugin
from lowering.xla import backend as xla
from sharding_rules.rules import Rules


def extract(program: Program, observe: Callable[[str, str], None]) -> None:
    """Trace and split every graph for the plugin's devices, and give it to the plugin.

    Raises:
        LoweringError: the plugin is not here, does not extract, or shows other devices.
        ShardingError: an array cannot be placed.
    """
    target = Target.parse(program.target)
    placed_on = plugin.devices(target)
    rules = Rules.load(program.rules)
    for name in GRAPHS:
        graph = build_graph(program, name)
        lowered = xla.lower(graph, rules, mesh_shape(program), target, placed_on)
        plugin.give(lowered)
        observe(name, "extracted")
