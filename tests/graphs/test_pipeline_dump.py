"""Dumps of pipelines: arrays are those of one device, and a planted fault is found."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import LLAMA, loaded, program, state_of, stored
from test_dump import FAULTS, PLAIN, Faults, dumped
from test_dump import stored as stored_dump

from graphtrain.config.schema import Batch, Dump, Mesh, Model, PipelineSettings
from graphtrain.run.dumps.compare import compare_arrays, compare_dumps, summary_of
from sharding_rules.pipeline import Schedule


def in_stages(schedule: Schedule, model: Model = LLAMA, rounds: int = 1, **mesh: int):
    """A program with two stages and four microbatches."""
    return program(
        model=model,
        target=f"cpu:{2 * int(np.prod(list(mesh.values())))}",
        mesh=Mesh(stage=2, **mesh),
        batch=Batch(global_batch_size=8, seq_len=16, microbatches=4),
        pipeline=PipelineSettings(schedule=schedule, virtual_stages=rounds),
    )


DEEP = dataclasses.replace(LLAMA, layers=5)  # one chunk has a row of padding
CASES = {
    "gpipe": in_stages("gpipe", data=2, tensor=2),
    "1f1b": in_stages("1f1b", data=2, tensor=2),
    "circular": in_stages("circular", DEEP, rounds=2, fsdp=2),
    "1f1b with context": in_stages("1f1b", DEEP, context=2),
    "interleaved": in_stages("1f1b", DEEP, rounds=2, fsdp=2),
}


@pytest.mark.parametrize("case", ["1f1b", "1f1b with context", "circular", "interleaved"])
def test_arrays_of_a_pipeline_are_those_of_one_device(case):
    of = CASES[case]
    one, many = dumped(program(model=of.model)), dumped(of)
    assert list(one) == list(many)
    for name in one:
        assert compare_arrays(one[name], many[name])["relative"] < 2e-5, name
    for fact in loaded(of, "dump").record["dump"]["arrays"]:  # dump.json must tell the truth
        array = many[fact["name"]]
        assert (list(array.shape), array.dtype.name) == (fact["shape"], fact["dtype"])


def test_a_summary_of_a_pipeline_has_the_statistics_of_the_whole_arrays():
    some = Dump(arrays=("layers/1/mlp*", "logits"), summary=True)
    whole, summaries = dumped(PLAIN), dumped(dataclasses.replace(CASES["gpipe"], dump=some))
    assert len(summaries) == 2 * 6 + 4 + 2  # activations twice, weights, metrics
    for name, summary in summaries.items():
        expected = whole[name] if name.startswith("metrics/") else summary_of(whole[name])
        np.testing.assert_allclose(summary, expected, rtol=2e-5, atol=1e-8, err_msg=name)


@pytest.fixture(scope="module")
def faulty():
    """The pipeline with the faults; its settings name the same arrays in another way."""
    of = dataclasses.replace(CASES["1f1b"], dump=Dump(arrays=("*", "forward/*")))
    first, second, third = Faults().planted()
    with first, second, third:
        loaded(of, "dump")
    return of


@pytest.mark.parametrize("layer", range(LLAMA.layers))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_constant_is_the_first_difference_in_a_pipeline(faulty, fault, layer, tmp_path):
    mark, expected, _ = FAULTS[fault]
    state = jax.tree.map(np.copy, state_of(PLAIN))
    state["parameters"]["layers"]["attention_norm"]["scale"][layer, 0] = mark
    right = stored_dump(tmp_path / "right", dumped(PLAIN, state), {})
    wrong = stored_dump(tmp_path / "wrong", dumped(faulty, stored(faulty, state)), {})
    first = compare_dumps(right, wrong).first
    assert first is not None and first.name == expected.format(layer)
    assert first.relative == pytest.approx(0.01, rel=0.1)
