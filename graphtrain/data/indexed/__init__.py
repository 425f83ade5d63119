"""Indexed datasets on disk, in the format of Megatron-LM: read, write, merge, verify."""
