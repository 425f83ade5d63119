"""PyTorch and Hugging Face models as they are: traced abstractly into JAX, sharded by name.

torchax says what each of PyTorch's operations is in JAX; everything around that is here. Imports
PyTorch only when a model is asked for: a run, which traces nothing, imports none of it.
"""
