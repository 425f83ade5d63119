"""Checkpoints of Megatron-LM and of what is built on it, as arrays by one set of names.

Both layouts are read: torch-dist (`.metadata` and `.distcp` files) and one folder for each rank
(`mp_rank_XX`). Classes that their pickles name are never looked up: an empty one stands in.

Imports no JAX; PyTorch when the first file is read.
"""
