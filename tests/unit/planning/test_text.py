"""Tables of a plan on a terminal."""

import io

import pytest
from rich.console import Console

from graphtrain.planning.assess import estimate
from graphtrain.planning.text import collectives_table, time_table

PIPELINE = [
    "program.target=h100:8",
    "program.mesh={fsdp=2, stage=4}",
    "program.batch.microbatches=4",
]
SMALL = ["program.model.embed=64", "program.model.vocab=128", "program.batch.seq_len=64"]


def printed(table):
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def test_traffic_that_is_too_little_to_show_is_not_0(vary):
    out = printed(collectives_table(estimate(vary([*PIPELINE, *SMALL]))))
    assert "<0.1" in out and " 0.0 " not in out


def test_selective_recomputation_in_stages_takes_less_time_and_more_memory(vary):
    model = ["program.model.layers=8", "program.model.remat=dots"]
    stages, selective = (
        estimate(vary([*PIPELINE, *model, f"program.pipeline.recompute_stages={recomputed}"]))
        for recomputed in ("true", "false")
    )
    assert selective.time.compute < stages.time.compute
    assert selective.memory.activations > stages.memory.activations


@pytest.mark.parametrize(
    ("change", "shown"), [(PIPELINE, True), (["program.target=h100:4"], False)]
)
def test_only_pipelines_have_a_bubble(vary, change, shown):
    assert ("pipeline bubble" in printed(time_table(estimate(vary(change))))) == shown
