"""Errors that a user can fix: the base of all of them, and those of rules and meshes."""


class UserError(Exception):
    """An error that the user can fix; the message says what is wrong and what to change.

    The command prints it in one line and exits with `exit_status`. Any other exception is a defect.
    """

    exit_status = 2


class ShardingError(UserError, ValueError):
    """Rules and mesh cannot be applied to an array; the message says what to change."""
