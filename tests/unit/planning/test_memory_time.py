"""Seconds of memory traffic, of a step with and without a pipeline."""

import pytest

from graphtrain.cost_model.memory import activation_bytes_written, memory
from graphtrain.planning.assess import estimate


@pytest.mark.parametrize("schedule", ["circular", "gpipe", "1f1b"])
def test_activations_of_a_pipeline_are_written_once_for_any_number_of_microbatches(vary, schedule):
    def written(microbatches):
        batch = f"program.batch={{global_batch_size=64, seq_len=512, microbatches={microbatches}}}"
        pipeline = f'program.pipeline={{schedule="{schedule}"}}'
        program = vary(["program.mesh={stage=4}", batch, pipeline])
        return activation_bytes_written(program), estimate(program).time.memory

    (few, _), (many, seconds) = written(4), written(64)
    # Fewer bubbles write less; the same tokens write the same.
    assert 0.5 * few < many <= few
    assert seconds < 8 * written(4)[1]  # weights are read for each of 16 times as many


def test_without_a_pipeline_a_microbatch_writes_what_is_in_memory_at_once(vary):
    batch = "program.batch={global_batch_size=16, seq_len=512, microbatches=4}"
    program = vary([batch])
    assert activation_bytes_written(program) == pytest.approx(4 * memory(program).activations)
