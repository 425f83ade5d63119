"""Export of a strategy in the file format of MindSpore and MindFormers."""

from pathlib import Path

from graphtrain.config.resolve import ResolvedProgram
from lowering.ascend.strategy import strategy_file

_PARAMETERS = "state/parameters/"


def write_ckpt(path: Path, program: ResolvedProgram) -> None:
    """Write the shardings of a program's parameters as MindSpore's parameter strategy file.

    Parameter names are those of graphtrain's checkpoints with dots, as in layers.attention.query.

    Raises:
        ShardingError: the rules cannot split an array.
        OSError: the file cannot be written.
    """
    from graphtrain.graphs.plan import plan_program

    plan = plan_program(program)
    layouts = {
        name.removeprefix(_PARAMETERS).replace("/", "."): layout
        for name, layout in plan.layouts.items()
        if name.startswith(_PARAMETERS)
    }
    path.write_bytes(strategy_file(layouts, plan.mesh))
