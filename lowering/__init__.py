"""How a Graph becomes an executable: targets, toolchains, backends.

May import `sharding_rules`; knows nothing of language models.
"""

import importlib
from types import ModuleType

from lowering.target import Target

_BACKENDS = {
    "cpu": "lowering.jax_xla",
    "cuda": "lowering.jax_xla",
    "tpu": "lowering.jax_xla",
    "neuron": "lowering.neuron.backend",
}


def backend(target: Target) -> ModuleType:
    """The module that lowers, compiles and loads for a target; imported when first asked for."""
    return importlib.import_module(_BACKENDS[target.platform])
