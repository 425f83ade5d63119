"""Masks of transformers become markers: no mask of length x length is made."""

import pytest
import torch
from transformers import MistralConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from graphtrain.torch_frontend import hf_attention
from graphtrain.torch_frontend.hf_attention import CausalMask

APART = torch.tensor([[0, 1, 2, 0, 1, 0]])  # three documents in one row
TOGETHER = torch.arange(6)[None]


@pytest.mark.parametrize("positions", [APART, TOGETHER], ids=["documents", "one document"])
@pytest.mark.parametrize(
    ("make", "window"), [(create_causal_mask, None), (create_sliding_window_causal_mask, 4)]
)
def test_a_causal_mask_is_not_materialised(make, window, positions):
    hf_attention.register()
    config = MistralConfig(sliding_window=4, attn_implementation=hf_attention.IMPLEMENTATION)
    embeds = torch.zeros(1, 6, 8)
    mask = make(config, embeds, None, None, positions)
    assert mask == CausalMask(window)


def test_a_mask_that_is_not_causal_is_kept():
    hf_attention.register()
    config = MistralConfig(attn_implementation=hf_attention.IMPLEMENTATION)
    prefix = {"or_mask_function": lambda batch, head, query, key: key < 2}
    mask = create_causal_mask(config, torch.zeros(1, 6, 8), None, None, TOGETHER, **prefix)
    assert not isinstance(mask, CausalMask)
    assert mask[0, 0, 0].tolist() == [True, True, False, False, False, False]
