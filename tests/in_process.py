"""The command in this process, as the shell would call it: its status and what it printed."""

import contextlib
import io
import signal
import sys
import warnings
from dataclasses import dataclass
from unittest import mock

from graphtrain import cli


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def graphtrain(*words: object) -> Outcome:
    """Call `graphtrain WORDS` without changing the signals and the warnings of the tests."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(signal, "signal"),
        mock.patch.object(warnings, "showwarning"),
        mock.patch.object(sys, "argv", ["graphtrain", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
    return Outcome(status, out.getvalue(), err.getvalue())
