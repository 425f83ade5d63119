"""Programs as graphs: init, train, evaluate, prefill and decode as pure functions."""

from lowering.tracing import source_lines

source_lines.report_package("graphtrain")
