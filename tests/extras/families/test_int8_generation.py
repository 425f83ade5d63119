"""Models whose weights are served in int8, beside PyTorch with the same numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from generation_cases import NATIVE, log_probs
from generation_parity import PROMPTS, begin, engine_of, finish, native_model

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
TEXT = PROMPTS[2]


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Round rows to 127 levels on each side of zero."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def as_int8(model: Any) -> Any:
    """Round the weights of every product, and what it multiplies, as the engine on a CPU does."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if name == "lm_head" and model.config.tie_word_embeddings:  # as the embedding: bfloat16
                module.weight.data = module.weight.data.bfloat16().float()
                module.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16().float())
            else:
                module.weight.data = quantized(module.weight.data)
                module.register_forward_pre_hook(lambda _, inputs: quantized(inputs[0]))
        elif isinstance(module, torch.nn.Embedding):
            module.weight.data = module.weight.data.bfloat16().float()
    return model


@pytest.mark.parametrize("name", ["llama 3", "gemma 2"], ids=["head", "tied head"])
@pytest.mark.parametrize(("target", "mesh"), [("cpu:1", {}), ("cpu:8", CUBE)])
def test_a_model_in_int8_scores_and_generates_as_pytorch_with_the_same_rounding(
    name, target, mesh, tmp_path
):
    reference = NATIVE[name].save(tmp_path / "source")
    exact = log_probs(reference, TEXT)[:-1].numpy()[np.arange(299), TEXT[1:]]
    model, weights = native_model(tmp_path / "source")
    engine = engine_of(model, weights, target, mesh, weights_dtype="int8")
    scores = [choice.log_prob for choice in engine.score(TEXT)[1:] if choice is not None]
    rounded = log_probs(as_int8(reference), TEXT)[:-1].numpy()[np.arange(299), TEXT[1:]]
    # A sum in another order rounds an activation now and then to the next of 127 levels.
    assert np.mean(np.abs(scores - rounded)) < 1e-4 < 5e-3 < np.mean(np.abs(exact - rounded))

    texts: dict[int, list] = {slot: [] for slot in range(engine.slots)}
    texts[1] = begin(engine, 1, TEXT)
    finish(engine, texts)
    tokens = [choice.token for choice in texts[1]]
    rows = log_probs(reference, TEXT + tokens)[len(TEXT) - 1 : -1]
    found = np.array([choice.log_prob for choice in texts[1]])
    np.testing.assert_allclose(found, rows.max(-1).values.numpy(), atol=0.05)
