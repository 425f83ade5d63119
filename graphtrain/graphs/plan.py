"""Plan of a program: where each input of its training step lives."""

from graphtrain.config.resolve import ResolvedProgram
from sharding_rules.plan import Plan, make_plan


def plan_program(program: ResolvedProgram) -> Plan:
    """Return the plan of all inputs of the training step, on the program's target.

    Raises:
        ShardingError: the rules cannot split an array over the mesh.
    """
    from graphtrain.graphs.build import build_graph  # imports JAX and Flax
    from lowering.trees import flatten

    inputs = build_graph(program, "train").inputs
    return make_plan(flatten(dict(inputs)), program.rules, program.mesh)
