"""The product: configuration, models, the cache, the loop, the command.

May import `lowering` and `sharding_rules`. Importing this package imports neither them nor JAX.
"""
