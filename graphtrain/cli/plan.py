"""graphtrain plan: predict the memory, communication and time of each device of a run.

`graphtrain plan CONFIG` runs the command `show` of this group, whose name is left out.
"""

import importlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from graphtrain.cli.usage import Group, unknown_command

# name: module, function, help
_COMMANDS = {
    "diff": (
        "plan_diff",
        "diff",
        "Show the differences between two configurations, or made by settings.",
    ),
    "lock": ("plan_lock", "lock", "Write the plan as text, to keep in version control."),
    "check": ("plan_lock", "check", "Compare the plan with its lock; exit with 5 if they differ."),
    "search": ("search", "command", "Rank the parallelism strategies for a model and a machine."),
}


class _Plan(Group):
    """Command group that passes arguments that name none of its commands to `show`."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args[:1] == ["show"] and not Path("show").exists():  # the name that may be left out
            args = args[1:] or ["--help"]
        if args and args[0] not in (*_COMMANDS, "-h", "--help"):
            if get_close_matches(args[0][:100], _COMMANDS) and not Path(args[0]).exists():
                parent = parent or click.Context(self, info_name=info_name)
                raise unknown_command(args[0], list(_COMMANDS), parent)
            return _load("plan_show", "show").make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, function, _ = _COMMANDS[cmd_name]
        return _load(module, function)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        show = _load("plan_show", "show")
        options = show.shell_complete(click.Context(show, parent=ctx), incomplete)
        return super().shell_complete(ctx, incomplete) + options

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
    """Show the memory, communication and time of each device for the training step of CONFIG.

    The step is compiled for the target, into the cache and without an accelerator. If the compiler
    of the target is not installed, the figures are estimates. If the step does not fit the memory
    of a device, also prints the cheapest changes with which it fits, and exits with 4.

    With --for serve, shows how many slots fit and how fast they can be at most.
    """
