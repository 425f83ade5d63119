"""Which frozen weights of LoRA are stored in fewer bits: matrices, and no bias of experts."""

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, MixtureOfExperts, Model, Program
from graphtrain.models.lora.trainable import frozen_arrays

MIXTURE = MixtureOfExperts(experts=4, expert_bias=True, shared_expert_mlp=24)
MODEL = Model(layers=2, embed=16, heads=2, mlp=24, vocab=32, bias="attention", moe=MIXTURE)


@pytest.mark.parametrize("base", ["int8", "nf4", "bfloat16"])
def test_norms_biases_and_routers_of_a_mixture_stay_in_float32(base):
    adapter = Adapter(rank=4, alpha=8.0, base_dtype=base)
    program = Program(
        target="cpu:1",
        model=MODEL,
        batch=Batch(global_batch_size=1, seq_len=8),
        adapter=adapter,
    )
    arrays = frozen_arrays(resolve(program))
    whole = {path for path, spec in arrays.items() if spec.dtype == "float32"}
    vectors = ("scale", "bias", "router", "shared_share")
    assert {path for path in whole if not path.endswith("/scales")} == {
        path for path in arrays if path.endswith(vectors)
    }
    assert {f"layers/mlp/{name}_bias" for name in ("gate", "up", "down", "router")} <= whole
