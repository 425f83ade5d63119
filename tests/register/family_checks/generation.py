"""Decoding with a KV cache, compared with eager PyTorch without one."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

from family_checks.states import LENGTH, UNOPTIMIZED, Mismatch, batch, module_parameters
from graphtrain.config.schema import TorchModel
from graphtrain.graphs.open_model import open_language_model
from graphtrain.models.attention.cache_layout import DOT_LAYOUT, CacheSize
from graphtrain.models.attention.kv_cache import CacheRows, layer_cache_specs
from graphtrain.torch_frontend.document_isolation import check_documents_isolated
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import module_with_weights
from lowering.trees import Tree, unflatten

_PROMPT = 6  # tokens in the first call; the others follow one by one
_TOLERANCE = 1e-4  # of the largest logit


def check_generate(model: TorchModel, folder: Path) -> str:
    """Compare the logits of a prompt and of each token after it.

    A model that `graphtrain generate` refuses, since only attention has a cache, is refused.
    """
    check_documents_isolated(model)
    language_model, module = open_language_model(model), module_with_weights(model).eval()
    size = CacheSize(LENGTH, 0, _PROMPT, DOT_LAYOUT)
    cache = {
        f"{path}/{name}": jnp.zeros(spec.shape, spec.dtype)
        for path, layer in language_model.cached_layers().items()
        for name, spec in layer_cache_specs(layer, 1, size, "float32").items()
    }
    tokens = batch(0)["tokens"][0, :1]

    def decode(parameters: Tree, cache: Tree) -> jax.Array:
        rows = CacheRows(jnp.zeros(1, jnp.int32), LENGTH)
        prompt = tokens[:, :_PROMPT]
        first, cache = language_model.decode_step(parameters, cache, prompt, rows)

        def one(cache: Tree, position: jax.Array) -> tuple[Tree, jax.Array]:
            token = jax.lax.dynamic_slice_in_dim(tokens, position, 1, 1)
            rows = CacheRows(position[None], LENGTH)
            logits, cache = language_model.decode_step(parameters, cache, token, rows)
            return cache, logits[:, 0]

        _, others = jax.lax.scan(one, cache, jnp.arange(_PROMPT, LENGTH))
        return jnp.concatenate([first[0], others[:, 0]])

    run = jax.jit(decode, compiler_options=UNOPTIMIZED)
    found = np.asarray(run(module_parameters(open_model(model), module), unflatten(cache)))
    with torch.no_grad():
        ids = torch.tensor(np.asarray(tokens), dtype=torch.long)
        expected = module(input_ids=ids, use_cache=False).logits[0].float().numpy()
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not difference < _TOLERANCE:
        raise Mismatch(f"the logits of a continued sequence differ by {difference:.1e}")
    return f"logits {difference:.0e}"
