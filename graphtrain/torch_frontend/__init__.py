"""Unmodified PyTorch and Hugging Face models, traced into JAX and sharded by parameter name.

torchax translates each PyTorch operation to JAX; this package adds the rest. PyTorch is imported
only when a model is built. `graphtrain run` loads compiled programs and does not import it.
"""
