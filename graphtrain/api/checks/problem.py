"""A problem of a configuration that is known before anything is compiled."""

from dataclasses import dataclass

from graphtrain.api.checks.purpose import Kind
from graphtrain.config.lines import KeyPath


@dataclass(frozen=True)
class Problem:
    """One problem: what is wrong, and what to change."""

    kind: Kind
    message: str
    # Settings that cause it, of which the message is located at one; empty: those that it names.
    settings: tuple[KeyPath, ...] = ()
    # Place in another file or on the command line; empty: the message begins with its place.
    location: str | None = None
