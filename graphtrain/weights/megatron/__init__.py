"""Import of checkpoints of Megatron-LM and its derivatives, with one canonical set of names.

Both formats are supported: torch-dist (`.metadata` and `.distcp` files) and one folder per rank
(`mp_rank_XX`). Classes that the pickles name are never imported; placeholders replace them.

Does not import JAX; imports PyTorch when the first file is read.
"""
