"""Causal self-attention: dense, blockwise, flash kernels, ring; positions, masks, KV cache."""
