"""A strategy in the form that MindSpore and MindFormers read."""

from pathlib import Path

from graphtrain.config.schema import Program
from lowering.ascend.strategy import strategy

_PARAMETERS = "state/parameters/"


def write_ckpt(path: Path, program: Program) -> None:
    """Write how the parameters of a program are split, as MindSpore's parameter strategy file.

    Names are those of our checkpoints with dots, as in layers.attention.query.

    Raises:
        LoweringError: no such target.
        ShardingError: an array cannot be placed.
        OSError: the file cannot be written.
    """
    from graphtrain.planning.assess import plan_program

    plan = plan_program(program)
    layouts = {
        name.removeprefix(_PARAMETERS).replace("/", "."): layout
        for name, layout in plan.layouts.items()
        if name.startswith(_PARAMETERS)
    }
    path.write_bytes(strategy(layouts, plan.mesh))
