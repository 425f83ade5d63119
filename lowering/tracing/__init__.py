"""Context that models read while they are traced: sharding constraints, the target, marked regions.

May import `lowering.machine`, the root modules of `lowering` and `sharding_rules`.
"""
