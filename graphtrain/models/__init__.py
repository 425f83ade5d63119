"""Model architectures: one decoder whose settings (`Model`) cover Llama, GPT-2 and similar models.

May import `lowering` and `sharding_rules`. Importing this package or `models.flops` imports
neither JAX nor Flax, because the training process needs only the counts.
"""
