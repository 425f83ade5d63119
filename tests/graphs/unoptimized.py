"""Options for tests that ask what a program computes and not how well XLA:CPU makes its code."""

import jax

# The partitioned program is the same. Its code takes no LLVM passes, and not the emitters of MLIR,
# which are most of what is left: CPU seconds for gradients of 2 layers 2.2, so 0.4; of a pipeline
# of 8 layers 5.3, so 1.3 (jaxlib 0.10.2). From jaxlib 0.11 on there are no other emitters.
OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
