"""The process that exports a run which is complete."""

import subprocess
import sys

from graphtrain.checkpoints.side_process import read_events, report
from graphtrain.run import export
from graphtrain.run.export_process import ExportJob

TALKS = "print('a library says something ' * 20_000); print('{\"note\": \"exported\"}')"


def test_an_export_ends_whatever_libraries_print(monkeypatch):
    def start(*arguments):
        words = [sys.executable, "-c", TALKS]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(export, "start_process", start)
    notes, polls = [], iter(range(100))
    export._export(ExportJob("run", 3, None), lambda: next(polls) > 90, notes.append)
    assert notes == ["exported"]


def test_an_event_is_read_also_after_what_a_library_printed_on_its_line(capsys):
    print("50 %", end="")
    report(error="no space left")
    assert list(read_events(capsys.readouterr().out.splitlines())) == [{"error": "no space left"}]
