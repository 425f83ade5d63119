"""From text to batches: a tokenizer, an indexed dataset on disk, and its packing into sequences.

May import `graphtrain.errors` and NumPy. Grain is imported by a `Loader`, sentencepiece by its
tokenizer, Jinja by chat templates, and JAX never, so that a command pays only for what it uses.
"""
