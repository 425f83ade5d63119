"""Training stack: configuration, models, data, program cache, training loop and command line.

May import `lowering` and `sharding_rules`. Importing this package alone imports neither of them,
nor JAX.
"""
