"""The reference of all commands, from the definitions that --help prints too."""

import inspect
import re
from collections.abc import Iterator

import click
from markdown import table

from graphtrain.cli import _root

HEAD = """# Commands

Every command with all of its options. `graphtrain COMMAND --help` prints the same.

- `CONFIG|RUN` is a configuration file, or a run directory, which stands for its `config.toml`.
- Results go to standard output, progress and errors to standard error.
- The [exit statuses](errors.md#exit-statuses) are the same for all commands.
- [Tab completion](../getting-started/install.md#tab-completion) knows all commands and options.

"""


def page() -> str:
    """Return the page."""
    sections = "\n".join(_sections(_root, "graphtrain", None))
    return HEAD + re.sub(r"\n{3,}", "\n\n", sections).rstrip("\n") + "\n"


def _sections(command: click.Command, path: str, parent: click.Context | None) -> Iterator[str]:
    context = command.context_class(command, parent=parent, info_name=path.rpartition(" ")[2])
    if parent is not None:
        depth = "#" * len(path.split())
        yield f"{depth} {path.partition(' ')[2]}\n"
        yield f"```text\n{_usage(command, context, path)}\n```\n"
        yield _help(command)
        yield _options(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _sections(inner, f"{path} {name}", context)


def _usage(command: click.Command, context: click.Context, path: str) -> str:
    formatter = context.make_formatter()
    formatter.width = 1000
    command.format_usage(context, formatter)
    usage = formatter.getvalue().strip().removeprefix("Usage: ")
    return f"{path} {usage.partition(path)[2].strip()}"


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").strip() + "\n"


def _options(command: click.Command, context: click.Context) -> str:
    shown = command
    if command.name == "plan":  # without a name, its arguments are those of plan show
        from graphtrain.cli.plan_show import show as shown
    options = [one for one in shown.params if isinstance(one, click.Option) and not one.hidden]
    rows = [(_names(one, context), _meaning(one)) for one in options]
    return table(("option", "meaning"), rows) if rows else ""


def _names(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    if option.secondary_opts:
        names += ", " + ", ".join(f"`{name}`" for name in option.secondary_opts)
    if option.is_flag or option.count:
        return names
    return f"{names} `{_value(option, context)}`"


def _value(option: click.Option, context: click.Context) -> str:
    if option.metavar:
        return option.metavar
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return option.type.name.upper().removesuffix(" RANGE")


def _meaning(option: click.Option) -> str:
    text = option.help or ""
    if isinstance(option.show_default, str):
        text += f" [default: {option.show_default}]"
    elif option.show_default and not callable(option.default):
        text += f" [default: {_default(option)}]"
    text += " **Required.**" if option.required else ""
    return re.sub(r"(?<!\*)\*(?!\*)|<", r"\\\g<0>", text)


def _default(option: click.Option) -> str:
    default = option.default
    return ", ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
