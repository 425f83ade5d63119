"""Datasets in an object store: local copies of their indexes, and blocks of their tokens."""
