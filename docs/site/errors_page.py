"""The reference of exit statuses and of the errors that a user can fix."""

from collections.abc import Iterator

from markdown import table

from graphtrain import errors, files
from lowering import errors as _lowering_errors  # defines more of them
from sharding_rules.errors import UserError

HEAD = """# Errors and exit statuses

An error that you can fix is printed in one line: what is wrong, where, and what to do.

```text
error: small.toml:6: unknown setting program.model.haeds; did you mean program.model.heads?
```

All problems of a configuration are reported at once. An error of one rank is reported by all
ranks, and all exit with its status. Any other exception is a defect in graphtrain and keeps its
traceback: please report it.

## Exit statuses

"""
# Of the errors of other modules no caller needs to know the class.
_MODULES = ("graphtrain.errors", "graphtrain.files", "lowering.errors", "sharding_rules.errors")
CLASSES = """
## Exceptions

These are the classes of the errors that a user can fix. From Python, catch `UserError` for all
of them, or one of its subclasses.

"""


def page() -> str:
    """Return the page."""
    statuses = table(
        ("status", "meaning"), [(f"`{key}`", text) for key, text in errors.EXIT_STATUSES.items()]
    )
    rows = [
        (f"`{one.__module__}.{one.__name__}`", (one.__doc__ or "").partition("\n")[0],
         f"`{one.exit_status}`")
        for one in error_classes()
    ]  # fmt: skip
    return HEAD + statuses + CLASSES + table(("exception", "meaning", "status"), rows)


def error_classes() -> list[type[UserError]]:
    """Return UserError and all of its subclasses that the product defines, by module and name."""
    defined = UserError.__subclasses__()
    assert _lowering_errors.LoweringError in defined and files.OutputExists in defined
    return sorted(_with_subclasses(UserError), key=lambda one: (one.__module__, one.__name__))


def _with_subclasses(one: type[UserError]) -> Iterator[type[UserError]]:
    if one.__module__ in _MODULES:
        yield one
    for inner in one.__subclasses__():
        yield from _with_subclasses(inner)
