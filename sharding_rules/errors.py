"""What a user can fix about placement."""


class ShardingError(ValueError):
    """An array cannot be placed as the rules and the mesh ask; the message says what to change."""
