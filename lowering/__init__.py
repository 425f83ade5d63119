"""Lower, compile and load a Graph for a target: targets, toolchains and backends.

May import `sharding_rules`, and nothing from `graphtrain`. Contains no code specific to language
models.
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
    """Return the module that lowers, compiles and loads for a target. Import it on first use."""
    return importlib.import_module(_BACKENDS[target.platform])
