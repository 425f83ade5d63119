"""The reference of `import graphtrain`, from its signatures and docstrings."""

import inspect
import re
from collections.abc import Callable

import graphtrain

HEAD = """# Python functions

The signatures and descriptions of `import graphtrain as gt`. The [guide](../guides/python.md) shows
how they are used, and lists what they return.

"""


def page() -> str:
    """Return the page."""
    functions = [
        getattr(graphtrain, name)
        for name in graphtrain.__all__
        if inspect.isfunction(getattr(graphtrain, name))
    ]
    return HEAD + "\n".join(map(_section, functions))


def _section(function: Callable) -> str:
    name = function.__name__
    return f"## {name}\n\n```python\n{_signature(function)}\n```\n\n{_description(function)}\n"


def _signature(function: Callable) -> str:
    """Return the signature as its author wrote it, one parameter on each line if it is long."""
    signature = inspect.signature(function)
    parameters = [_parameter(one) for one in signature.parameters.values()]
    keywords = [one.kind is one.KEYWORD_ONLY for one in signature.parameters.values()]
    if True in keywords:
        parameters.insert(keywords.index(True), "*")
    result = str(signature.return_annotation).replace("'", "")
    line = f"gt.{function.__name__}({', '.join(parameters)}) -> {result}"
    if len(line) <= 90:
        return line
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"gt.{function.__name__}(\n{lines}) -> {result}"


def _parameter(one: inspect.Parameter) -> str:
    name = "*" + one.name if one.kind is one.VAR_POSITIONAL else one.name
    text = f"{name}: {one.annotation}"
    if one.default is one.empty:
        return text
    return text + (" = ..." if callable(one.default) else f" = {one.default!r}")


def _description(function: Callable) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    text = inspect.cleandoc(function.__doc__ or "")
    text = re.sub(r"\n +(?=\S)(?!\w+:)", " ", text)  # continued lines of a section's entries
    text = re.sub(r"(?m)^(Args|Raises|Returns):$", r"**\1**\n", text)
    return re.sub(r"(?m)^ +(\w+): ", r"- `\1`: ", text)
