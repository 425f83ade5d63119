"""Plan of a program: where each input of its training step lives."""

from graphtrain.config.resolve import ResolvedProgram
from sharding_rules.plan import Plan, make_plan


def plan_program(program: ResolvedProgram) -> Plan:
    """Return the plan of all inputs of the training step, on the program's target.

    Raises:
        ShardingError: the rules cannot split an array over the mesh, or a pattern of theirs matches
            no array.
    """
    from graphtrain.graphs.build import build_graph  # imports JAX and Flax
    from lowering.trees import flatten

    graph = build_graph(program, "train")
    program.rules.check_patterns(graph.arrays())
    return make_plan(flatten(dict(graph.inputs)), program.rules, program.mesh)
