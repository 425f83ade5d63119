"""Canaries: tests of private interfaces of libraries, which say what to do when they break."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType


def make_canary(module: ModuleType, remedies: Mapping[str, str], changed: str) -> Callable:
    """Return a decorator `canary(*names)` for tests of functions of a module of ours.

    Args:
        module: module of the private interfaces.
        remedies: what to do when a function breaks, by its name.
        changed: sentence for a failure, with the versions of the libraries.
    """
    label = module.__name__.rpartition(".")[2]

    def canary(*names):
        def mark(test):
            @functools.wraps(test)
            def run(*arguments, **named):
                try:
                    test(*arguments, **named)
                except Exception as error:
                    what = "\n".join(f"{label}.{name}: {remedies[name]}" for name in names)
                    error.add_note(f"{changed}\n{what}")
                    raise

            run.guards = names
            return run

        return mark

    return canary


def public_functions(module: ModuleType) -> set[str]:
    """Return the names of the functions that a module defines for others."""
    return {
        name
        for name, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == module.__name__ and name[0] != "_"
    }


def guarded_functions(tests: Mapping[str, object]) -> set[str]:
    """Return the names that the canaries in a test module's globals guard."""
    return {name for each in tests.values() for name in getattr(each, "guards", ())}
