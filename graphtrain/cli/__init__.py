"""The command line. Each module defines one command or group: it parses, calls and prints.

A module is imported only when its command is used, so that no command pays for the imports of
others.
"""

import atexit
import errno
import importlib
import os
import signal
import sys
import traceback
import warnings
from types import FrameType
from typing import NoReturn

import click

from graphtrain.cli.terminal import say
from graphtrain.cli.usage import Group, usage_message
from graphtrain.errors import EXIT_STATUSES
from lowering.machine.extras import is_optional, missing_extra

_COMMAND_HELP = {
    "cache": "List, explain, verify, share and remove compiled programs.",
    "chat": "Chat with a run in the terminal.",
    "checkpoints": "List, show, verify, copy and remove the checkpoints of a run.",
    "compare": "Find the first difference between two dumps.",
    "compile": "Compile every graph of a run into the cache, in parallel.",
    "config": "Check or show a configuration; print the reference of settings.",
    "convert": "Convert weights from and to other formats; reshard checkpoints.",
    "data": "Tokenize text and conversations for training; inspect datasets.",
    "doctor": "Report what this machine can compile for and run on.",
    "dump": "Write activations and gradients of training steps.",
    "evaluate": "Measure the validation loss of a checkpoint, or evaluate it on tasks.",
    "extract": "Compile the graphs of a torch-xla script, without training.",
    "generate": "Generate text that continues a prompt.",
    "goodput": "Show where the wall time of a run went, over all of its starts.",
    "init": "Start a project: prepare data and write a configuration for it.",
    "launch": "Compile and train on a cluster with Slurm or Kubernetes.",
    "neuron": "Compile, inspect and clean caches and bundles for AWS Neuron.",
    "plan": "Show the memory, communication and time of each device.",
    "profile": "Compare the time of each operation of a step with the plan.",
    "run": "Train from compiled programs, without tracing or compiling.",
    "serve": "Serve a run over HTTP, with OpenAI's interface.",
    "watch": "Show runs on a local page while they train.",
}


class SignalReceived(BaseException):
    """Raised by the signal handler, so that files and locks are released, as with Ctrl-C."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.status = 128 + signal_number


class LazyGroup(Group):
    """Command group that imports each command on first use.

    A command is the object `command` of the module of the same name, with _ in place of -.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMAND_HELP)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMAND_HELP:
            return None
        return importlib.import_module(f"graphtrain.cli.{cmd_name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMAND_HELP.items()))


_EPILOG = "Exit status: " + "; ".join(f"{key} {text}" for key, text in EXIT_STATUSES.items()) + "."


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG.replace("`", ""),
)
@click.version_option(package_name="graphtrain")
def _root() -> None:
    """Plan, compile and train language models. Programs are compiled once and then cached."""


def main() -> None:
    """Run the command line: print an error that the user can fix in one line, without traceback."""
    warnings.showwarning = lambda message, *details: say(f"warning: {message}")
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signal_number, _stop)
    try:
        result = _root.main(prog_name="graphtrain", standalone_mode=False)
        status = result if isinstance(result, int) else 0  # of --help and ctx.exit()
        if _is_multi_process():
            _status_at_exit.append(status)
        sys.exit(status)
    except SignalReceived as stopped:
        _exit(stopped.status)
    except click.Abort:
        say("Aborted!")
        _exit(1)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        _exit(error.exit_code)
    except click.ClickException as error:
        say(f"error: {usage_message(error)}")
        _exit(error.exit_code)
    except Exception as error:
        status = _exit_status(error)
        if status is not None:
            say(f"error: {_words(error)}")
        elif _is_multi_process():
            traceback.print_exc()
        else:
            raise  # a defect of graphtrain: keep the traceback, exit 1
        _exit(status or 1)


_status_at_exit: list[int] = []  # of one of several processes, after success


@atexit.register  # the first handler of the process, and so the last that runs
def _end_without_destructors() -> None:
    """End one of several processes before XLA's objects are destroyed.

    The preemption service, which receives SIGTERM to the last, crashes when it is destroyed while
    it talks to another process that has ended.
    """
    if _status_at_exit:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status_at_exit[0])


def _stop(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise SignalReceived(signal_number)


def _exit(status: int) -> NoReturn:
    """Exit with `status`.

    One of several processes exits without JAX's exit handlers, which would wait for the others,
    while the others wait for this process.
    """
    if _is_multi_process():
        sys.stdout.flush()
        sys.stderr.flush()
        from lowering.xla import lost_ranks

        lost_ranks.wait_for_failed_ranks(status)
        os._exit(status)
    sys.exit(status)


def _is_multi_process() -> bool:
    processes = sys.modules.get("lowering.xla.distributed")
    return processes is not None and processes.count() > 1


def _exit_status(error: Exception) -> int | None:
    from sharding_rules.errors import UserError

    if isinstance(error, UserError):
        return error.exit_status
    if isinstance(error, ModuleNotFoundError):
        return 2 if is_optional(error.name) else None
    is_file_error = isinstance(error, OSError) and error.filename and error.errno in _USERS_ERRNO
    return 2 if is_file_error else None


_MAX_MESSAGE = 10_000  # characters; a damaged file may have names of megabytes
# The state of the user's files: names too long, links in circles, permissions, full disks. Others,
# such as a file that does not exist, may be a defect of graphtrain where they were not expected.
_USERS_ERRNO = {
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
}


def _words(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return str(missing_extra(error.name or "", "this command"))
    words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return words if len(words) <= _MAX_MESSAGE else f"{words[:_MAX_MESSAGE]}..."
