"""Dumps of imported models beside eager PyTorch: outputs of modules, by the modules' names."""

import jax
import numpy as np
import pytest
from programs import batch, loaded, placed_inputs, program
from test_torch_models import eager_loss, module_of, state_of
from torch_families import imported

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh
from graphtrain.errors import PlanError
from graphtrain.graphs.build import build_graph
from graphtrain.run.dumps.compare import compare_arrays
from graphtrain.run.dumps.eager import eager_arrays
from graphtrain.run.dumps.host_arrays import host_arrays

RATE = np.float32(1e-3)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_outputs_of_modules_and_their_gradients_are_those_of_eager_pytorch(kind, tmp_path):
    of = program(model=imported(tmp_path, kind), batch=Batch(global_batch_size=8, seq_len=12))
    module, inputs = module_of(of), batch(of)
    step = loaded(of, "dump")
    placed = placed_inputs(step, "state", state_of(of, module))
    outputs = jax.device_get(step(placed, placed_inputs(step, "batch", inputs), RATE))
    mine = host_arrays(resolve(of), step.record, outputs)
    theirs = eager_arrays(module, lambda: eager_loss(module, inputs), inputs["tokens"][0].shape)
    common = [name for name in theirs if name in mine]
    assert sum(name.startswith("forward/") for name in common) >= 2 * 6
    assert sum(name.startswith("backward/") for name in common) >= 2 * 6
    assert {name for name in theirs if name.startswith("gradients/")} <= set(mine)
    for name in common:
        assert compare_arrays(theirs[name], mine[name])["relative"] < 2e-5, name


def test_a_pipeline_of_an_imported_model_is_refused(tmp_path):
    of = program(
        model=imported(tmp_path, "llama"),
        target="cpu:2",
        mesh=Mesh(stage=2),
        batch=Batch(global_batch_size=8, seq_len=12, microbatches=2),
    )
    with pytest.raises(PlanError, match=r"of imported models \(mesh.stage = 2\)"):
        build_graph(resolve(of), "dump")
