"""Errors in sharding rules and meshes that a user can fix."""


class ShardingError(ValueError):
    """Rules and mesh cannot be applied to an array; the message says what to change."""
