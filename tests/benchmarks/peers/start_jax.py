"""The first step by jax.jit and JAX's persistent cache; the model, its init and step are ours.

python start_jax.py RESULT; in the directory that start.py prepares
"""

from marks import Marks

SEQUENCES, LENGTH = 8, 32


def main() -> None:
    marks = Marks()
    from pathlib import Path

    import jax
    import numpy as np

    marks.mark("import jax")
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve
    from graphtrain.graphs.build import build_graph
    from lowering.tracing.constrain import sharding, use_placement
    from lowering.trees import flatten, unflatten
    from lowering.xla import backend as xla

    marks.mark("import the model")
    program = resolve(load_config(Path("config.toml")).program)
    rules, shape = program.rules, program.mesh
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", shape.size(tuple(shape.axes)))
    jax.config.update("jax_compilation_cache_dir", "jax-cache")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    mesh = xla.make_mesh(shape, jax.devices())
    marks.mark("settings, devices")

    def jitted(graph, **options):
        plan = xla.plan_graph(graph, rules, shape)
        layouts = {path: sharding(plan.layouts[path], mesh) for path in flatten(graph.outputs)}
        return jax.jit(graph.step, out_shardings=unflatten(layouts), **options)

    rows = np.memmap("data/train.bin", np.uint16, "r")[: SEQUENCES * (LENGTH + 1)]
    tokens = rows.reshape(1, SEQUENCES, LENGTH + 1).astype(np.int32)
    weights = np.ones((1, SEQUENCES, LENGTH), np.float32)
    batch = {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}
    with use_placement(mesh, rules):
        state = jitted(build_graph(program, "init"))(np.uint32(0))["state"]
        marks.mark("trace and load init")  # which computes meanwhile
        train = jitted(build_graph(program, "train"), donate_argnums=0)
        metrics = train(state, batch, np.float32(3e-4))["metrics"]
        marks.mark("trace and load the step")
    loss = float(metrics["loss"])
    marks.mark("the rest of init, and the step")
    marks.finish(loss)


if __name__ == "__main__":
    main()
