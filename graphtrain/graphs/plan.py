"""Plan of a program: where each input of its training step lives."""

from graphtrain.config.resolve import mesh_shape
from graphtrain.config.schema import Program
from sharding_rules.plan import Plan, make_plan
from sharding_rules.rules import Rules


def plan_program(program: Program) -> Plan:
    """Return the plan of all inputs of the training step, on the program's target.

    Raises:
        LoweringError: unknown target.
        ShardingError: the rules cannot split an array over the mesh.
    """
    from graphtrain.graphs.build import build_graph  # imports JAX and Flax
    from lowering.trees import flatten

    mesh, rules = mesh_shape(program), Rules.load(program.rules)
    return make_plan(flatten(dict(build_graph(program, "train").inputs)), rules, mesh)
