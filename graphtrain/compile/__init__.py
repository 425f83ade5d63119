"""Compilation of the graphs of a run in parallel worker processes, into the cache."""
