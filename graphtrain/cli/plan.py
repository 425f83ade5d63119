"""graphtrain plan: what each device of a run holds, sends and waits for.

`graphtrain plan CONFIG` is the command `show` of this group, whose name nobody has to write.
"""

import importlib
from typing import Any

import click

# Name: the module that holds it, its function, its help.
_COMMANDS = {
    "diff": ("plan_diff", "diff", "what changes between two configurations, or by settings"),
    "lock": ("plan_lock", "lock", "write the plan as text to keep in git"),
    "check": ("plan_lock", "check", "compare with the lock; exit with 5 and the difference"),
    "search": ("search", "command", "rank the strategies for a model and a machine"),
}


class _Plan(click.Group):
    """A group that takes what is none of its commands for the arguments of `show`."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args and args[0] not in (*_COMMANDS, "-h", "--help"):
            return _load("plan_show", "show").make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, function, _ = _COMMANDS[cmd_name]
        return _load(module, function)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "CONFIG [OPTIONS] | COMMAND [ARGS]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        show = _load("plan_show", "show")
        click.Command.format_options(show, click.Context(show, parent=ctx), formatter)
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


def _load(module: str, function: str) -> click.Command:
    return getattr(importlib.import_module(f"graphtrain.cli.{module}"), function)


@click.command("plan", cls=_Plan)
def command() -> None:
    """Show what each device holds, sends and waits for when it trains as CONFIG says.

    The training step is compiled for the target, into the cache and with no accelerator; a target
    whose compiler is not installed is estimated. Exits with 4 if the step does not fit the device's
    memory, after the cheapest changes with which it would.
    """
