"""Data pipeline from text to batches: tokenizers, indexed datasets on disk, packing, loading.

This package may import `graphtrain.errors` and NumPy at module level. Grain is imported only by
`Loader`, sentencepiece by its tokenizer and Jinja by chat templates; JAX is never imported. A
command therefore pays only for the libraries that it uses.
"""
