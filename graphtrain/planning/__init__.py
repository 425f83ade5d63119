"""The plan of a program's training step; nothing is compiled and no device is needed."""

from graphtrain.config.schema import Program
from graphtrain.requests import mesh_shape
from sharding_rules.plan import Plan, make_plan
from sharding_rules.rules import Rules


def plan_program(program: Program) -> Plan:
    """Place every array that the training step takes, for the program's target.

    Raises:
        LoweringError: no such target.
        ShardingError: an array cannot be placed as the rules and the mesh ask.
    """
    from graphtrain.steps import build_graph  # imports JAX and Flax
    from lowering.trees import flatten

    mesh, rules = mesh_shape(program), Rules.load(program.rules)
    return make_plan(flatten(dict(build_graph(program, "train").inputs)), rules, mesh)
