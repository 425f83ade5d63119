"""Commands in groups, and the wording of errors in arguments: one for click's errors and ours."""

from difflib import get_close_matches
from typing import Any

import click

_KINDS = {click.types.IntParamType: "a whole number", click.types.FloatParamType: "a number"}


class Group(click.Group):
    """Command group that suggests the command that an unknown one may mean."""

    group_class = type  # groups inside it are Groups too

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            raise unknown_command(name, self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of each command's help, none of them cut."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(one)) for name, one in commands.items() if one])


def unknown_command(name: str, known: list[str], ctx: click.Context) -> click.UsageError:
    """Return the error for a command that does not exist."""
    close = get_close_matches(name[:100], known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(known)}"
    return click.UsageError(f"unknown command {name!r}; {hint}", ctx)


def usage_message(error: click.ClickException) -> str:
    """Return one line for an error in the arguments: what is wrong, and what to write."""
    match error:
        case click.NoSuchOption(option_name=name, ctx=ctx):
            options = {one.lstrip("-"): one for one in _options(ctx)}  # all have the same dashes
            close = get_close_matches(name[:100].lstrip("-"), options, n=1)
            return f"unknown option {name}; " + (
                f"did you mean {options[close[0]]}?"
                if close
                else f"see {_command_path(ctx)} --help"
            )
        case click.MissingParameter(param=param, ctx=ctx) if param is not None and ctx is not None:
            kind = "argument" if isinstance(param, click.Argument) else "option"
            usage = ctx.command.get_usage(ctx).removeprefix("Usage: ")
            return f"missing {kind} {_name(param)}; usage: {' '.join(usage.split())}"
        case click.BadParameter(param=param) if param is not None:
            return f"{_name(param)}: {_requirement(param.type) or _sentence(error.message)}"
        case click.BadParameter(param_hint=hint) if isinstance(hint, str):
            return f"{hint}: {_sentence(error.message)}"
    return _sentence(error.format_message())


def _summary(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    paragraph = " ".join((command.help or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "."


def _options(ctx: click.Context | None) -> list[str]:
    params = ctx.command.get_params(ctx) if ctx else []
    return [name for param in params for name in (*param.opts, *param.secondary_opts)]


def _command_path(ctx: click.Context | None) -> str:
    return ctx.command_path if ctx else "graphtrain"


def _name(param: click.Parameter) -> str:
    return param.opts[0] if isinstance(param, click.Option) else param.make_metavar(_ANY)


_ANY: Any = click.Context(click.Command(""))


def _requirement(kind: click.ParamType) -> str:
    """Return the values that a number or a choice accepts; empty for other types."""
    if isinstance(kind, click.Choice):
        *most, last = map(str, kind.choices)
        return f"should be {', '.join(most)} or {last}"
    for base, words in _KINDS.items():
        if isinstance(kind, base):
            return ", ".join([f"should be {words}", *_bounds(kind)])
    return ""


def _bounds(kind: Any) -> list[str]:
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    bounds = [] if low is None else [f"{'above' if kind.min_open else 'at least'} {low}"]
    return bounds + ([] if high is None else [f"{'below' if kind.max_open else 'at most'} {high}"])


def _sentence(message: str) -> str:
    """Return a message of click in our style: no capital letter at the beginning, no full stop."""
    return (message[:1].lower() + message[1:]).rstrip(".")
