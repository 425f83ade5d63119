"""Architectures: one decoder whose settings (`Model`) cover Llama and GPT-2.

May import `lowering.tracing` and `sharding_rules`. Importing this package or `models.counts`
imports neither JAX nor Flax, because the training process needs only the counts.
"""
