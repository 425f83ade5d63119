"""Errors that a user can fix: the base of all of them, and those of rules and meshes."""

from collections.abc import Sequence
from dataclasses import dataclass


class UserError(Exception):
    """An error that the user can fix; the message says what is wrong and what to change.

    The command prints it in one line and exits with `exit_status`. Any other exception is a defect.
    """

    exit_status = 2


class ShardingError(UserError, ValueError):
    """Rules and mesh cannot be applied to an array; the message says what to change."""


@dataclass(frozen=True)
class RuleProblem:
    """One mistake in rules: in the names that were given, or in a file that they name."""

    rules: str  # name of a preset, or path of a .toml file
    key: tuple[str, ...]  # path of the wrong key in the file; empty if the file cannot be read
    reason: str

    def __str__(self) -> str:
        where = [f"rules {self.rules!r}", *([".".join(self.key)] if self.key else [])]
        return ": ".join([*where, self.reason])


class RulesError(ShardingError):
    """Rules cannot be read, all problems of them."""

    def __init__(self, problems: Sequence[RuleProblem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
