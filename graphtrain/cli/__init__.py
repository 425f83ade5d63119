"""The command. Each module is one command or group; it parses, calls, prints, and decides nothing.

Modules are imported when their command is asked for, so that no command pays for another's imports.
"""

import importlib
import os
import signal
import sys
import traceback
import warnings
from types import FrameType
from typing import NoReturn

import click

_COMMANDS = {
    "cache": "list, explain, verify and collect compiled programs",
    "compile": "compile every graph of a run into the cache, in parallel",
    "config": "show a resolved configuration, or the JSON schema for editors",
    "convert": "bring weights from other formats and back, and runs to other layouts",
    "data": "make a sample corpus; prepare text and conversations for training",
    "doctor": "say what this machine can compile for and run on",
    "evaluate": "measure the validation loss of a trained model",
    "extract": "compile the graphs of a torch-xla script, without running it",
    "generate": "continue a prompt with a trained model",
    "launch": "compile and run on a cluster with Slurm or Kubernetes",
    "neuron-cache": "look into, finish and clean a cache of AWS's Neuron tools",
    "neuron-finish": "compile bundles where neuronx-cc is, into the cache",
    "plan": "show where every array lives and what each device holds",
    "run": "train from compiled programs; never traces or compiles",
}


class _Stopped(BaseException):
    """A signal asks to end; what is open is closed on the way, as for Ctrl-C in Python."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


class _Lazy(click.Group):
    """A group whose commands are the function `command` of the module of the same name; a module's
    name has _ for a command's -."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return importlib.import_module(f"graphtrain.cli.{cmd_name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="graphtrain")
def _root() -> None:
    """Train language models the way a compiler builds programs."""


def main() -> None:
    """Entry point: print what a user can fix as one line and exit with its status."""
    warnings.showwarning = lambda message, *about: click.echo(f"warning: {message}", err=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks
            signal.signal(number, _stop)
    try:
        _root.main(prog_name="graphtrain")
    except _Stopped as stopped:
        _exit(stopped.status)
    except Exception as error:
        status = _status(error)
        if status is not None:
            click.echo(f"error: {error}", err=True)
        elif _others_wait():
            traceback.print_exc()
        else:
            raise  # our defect: keep the traceback, exit 1
        _exit(status or 1)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped(number)


def _exit(status: int) -> NoReturn:
    """End; a process of several at once, as JAX would first wait for those who wait for it."""
    if _others_wait():
        sys.stdout.flush()
        sys.stderr.flush()
        sys.modules["lowering.machine.distributed"].leave()
        os._exit(status)
    sys.exit(status)


def _others_wait() -> bool:
    processes = sys.modules.get("lowering.machine.distributed")
    return processes is not None and processes.count() > 1


def _status(error: Exception) -> int | None:
    from graphtrain.errors import USER_ERRORS

    return getattr(error, "exit_status", 2) if isinstance(error, USER_ERRORS) else None
