"""How a Graph becomes an executable: targets, toolchains, backends.

May import `sharding_rules`; knows nothing of language models.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowering.machine.target import Target

_XLA = dict.fromkeys(("cpu", "cuda", "rocm", "tpu"), "lowering.xla.backend")
_BACKENDS: dict[str, str] = _XLA | {
    "ascend": "lowering.ascend.backend",
    "neuron": "lowering.neuron.backend",
}


def backend(target: "Target") -> ModuleType:
    """The module that lowers, compiles and loads for a target; imported when first asked for."""
    return importlib.import_module(_BACKENDS[target.platform])
