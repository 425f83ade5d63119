"""Messages for the terminal, which must not obey text from files and settings."""

import re

import click

# Control characters except tab and line feed; what reorders text; lone surrogates. A file name or
# the name of a tensor with an escape sequence could otherwise rewrite what the user reads.
_UNSAFE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def printable(text: str) -> str:
    """Return the text with every character that a terminal would obey as its escape."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(message: str) -> None:
    """Print a message on standard error."""
    click.echo(printable(message), err=True)
