"""Dumps of a training step: the arrays are right, and a planted fault is the first difference."""

import dataclasses
import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import CUBE, GPT2, LLAMA, batch, loaded, placed_inputs, program, state_of

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, Dump, Loss, Precision
from graphtrain.errors import PlanError
from graphtrain.graphs.build import build_graph
from graphtrain.models import block, mlp
from graphtrain.models.attention import module as attention
from graphtrain.run.dumps.compare import compare_arrays, compare_dumps, summary_of
from graphtrain.run.dumps.files import ArrayEntry, DumpIndex, StoredDump, write_index, write_step
from graphtrain.run.dumps.host_arrays import host_arrays
from lowering.trees import flatten

RATE = np.float32(1e-3)
PLAIN = program()
SPLIT = program(**CUBE, batch=Batch(global_batch_size=8, seq_len=16, microbatches=2))


def results(of, graph, state=None):
    """What a graph returns for a batch, on the host; the batch is the same for every mesh."""
    step = loaded(of, graph)
    rows = {k: v.reshape(1, -1, v.shape[-1]) for k, v in batch(PLAIN).items()}
    rows = {k: v.reshape(of.batch.microbatches, -1, v.shape[-1]) for k, v in rows.items()}
    placed = placed_inputs(step, "state", state or state_of(of))
    return jax.device_get(step(placed, placed_inputs(step, "batch", rows), RATE))


def dumped(of, state=None):
    """The arrays of a dump, by name."""
    return host_arrays(resolve(of), loaded(of, "dump").record, results(of, "dump", state))


def stored(directory, arrays, lines):
    """Write a dump of one step, and open it."""
    entries = [
        ArrayEntry(name, list(array.shape), str(array.dtype), lines.get(name, []))
        for name, array in arrays.items()
    ]
    about = {"target": "cpu:1", "mesh": {}, "dtype": "float32", "summary": False, "program": ""}
    steps = [write_step(directory, 1, arrays)]
    write_index(
        directory, DumpIndex(**about, identity={}, versions={}, arrays=entries, steps=steps)
    )
    return StoredDump.open(directory)


def test_a_dump_trains_as_the_ordinary_step_does():
    mine, ordinary = results(PLAIN, "dump"), results(PLAIN, "train")
    for path, array in flatten({name: ordinary[name] for name in ("state", "metrics")}).items():
        assert np.array_equal(array, flatten(mine)[path]), path


def test_a_dump_computes_products_in_the_dtype_of_the_run():
    in_int8 = program(precision=Precision(compute="int8"), dump=Dump(arrays=("forward/embedding",)))
    mine, ordinary = results(in_int8, "dump"), results(in_int8, "train")
    assert mine["metrics"]["loss"] == ordinary["metrics"]["loss"]
    assert mine["metrics"]["loss"] != results(PLAIN, "train")["metrics"]["loss"]


def test_a_loss_in_chunks_has_the_arrays_of_all_logits():
    one, chunks = dumped(PLAIN), dumped(program(loss=Loss(chunk=4)))
    assert set(one) - set(chunks) == {"forward/logits", "backward/logits"}
    for name, array in chunks.items():
        assert compare_arrays(one[name], array)["relative"] < 2e-5, name


def test_arrays_are_those_of_one_device_on_a_mesh_with_microbatches():
    one, many = dumped(PLAIN), dumped(SPLIT)
    assert list(one) == list(many)
    for name in one:
        assert compare_arrays(one[name], many[name])["relative"] < 2e-5, name
    for fact in loaded(SPLIT, "dump").record["dump"]["arrays"]:  # dump.json must tell the truth
        array = many[fact["name"]]
        assert (list(array.shape), array.dtype.name) == (fact["shape"], fact["dtype"])


def test_gradients_of_activations_explain_those_of_weights():
    arrays = dumped(PLAIN)
    for layer in range(LLAMA.layers):
        hidden = arrays[f"forward/layers/{layer}/mlp/hidden"]
        output = arrays[f"backward/layers/{layer}/mlp/output"]
        down = np.einsum("bsm,bse->me", hidden, output)
        np.testing.assert_allclose(arrays[f"gradients/layers/{layer}/mlp/down"], down, atol=1e-6)


def test_a_summary_has_the_statistics_of_the_whole_arrays():
    some = dataclasses.replace(SPLIT, dump=Dump(arrays=("layers/1/mlp*", "head"), summary=True))
    whole, summaries = dumped(SPLIT), dumped(some)
    assert len(summaries) == 2 * 5 + 4 + 1 + 2  # activations twice, weights, head, metrics
    for name, summary in summaries.items():
        expected = whole[name] if name.startswith("metrics/") else summary_of(whole[name])
        np.testing.assert_allclose(summary, expected, rtol=2e-5, atol=1e-8, err_msg=name)


def test_gradients_are_without_the_loss_scale():
    half = dataclasses.replace(LLAMA, dtype="float16")
    some = Dump(arrays=("backward/layers/1/mlp/output", "gradients/layers/1/mlp/down"))
    scaled, plain = dumped(program(model=half, dump=some)), dumped(PLAIN)
    for name, array in scaled.items():
        assert array.dtype == np.float32
        assert compare_arrays(plain[name], array)["relative"] < 5e-3, name


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        (
            ("backward/layers/1/attention/*",),
            "rotated_key rotated_query output context value key query",
        ),
        (("forward/layers/0/mlp_norm", "final_norm"), "mlp_norm final_norm final_norm"),
    ],
)
def test_patterns_choose_arrays(arrays, names):
    of = dataclasses.replace(PLAIN, dump=Dump(arrays=arrays))
    facts = build_graph(resolve(of), "dump").facts["dump"]["arrays"]
    assert sorted(fact["name"].rpartition("/")[2] for fact in facts) == sorted(names.split())


def test_an_unknown_name_is_answered_with_those_that_exist():
    of = dataclasses.replace(PLAIN, dump=Dump(arrays=("layers/*/atention*",)))
    with pytest.raises(PlanError, match=r"no array matches 'layers/\*/atention\*'.*attention_norm"):
        build_graph(resolve(of), "dump")


@pytest.mark.parametrize(
    "of",
    [
        program(model=GPT2),
        program(
            model=dataclasses.replace(LLAMA, remat="full", unroll=2),
            adapter=Adapter(rank=2, alpha=4),
        ),
    ],
    ids=["gpt2", "lora"],
)
def test_other_models_have_names_too(of):
    facts = build_graph(resolve(of), "dump").facts["dump"]["arrays"]
    names = [fact["name"] for fact in facts]
    assert "forward/layers/1/attention/context" in names and len(set(names)) == len(names)


# Wrong constants, planted where a weight of a layer has a certain value, so that one program has
# all of them: the mark, the first array that differs, and the file of the lines that make it.
FAULTS = {
    "context": (1.5, "forward/layers/{}/attention/context", "blockwise.py"),
    "hidden": (1.25, "forward/layers/{}/mlp/hidden", "activations.py"),
    "rotation": (1.75, "forward/layers/{}/attention/rotated_query", "positions.py"),
    "gradient of the MLP": (1.125, "backward/layers/{}/mlp/up", "activations.py"),
    "gradient of attention": (1.375, "backward/layers/{}/attention/rotated_query", "blockwise.py"),
}


class Faults:
    """The faults as replacements of functions of the model."""

    def __init__(self) -> None:
        self.mark: jax.Array | None = None
        self.call, self.attend = block.Block.__call__, attention.attend
        self.rotate, self.activate = attention.rotate, mlp.apply_activation

    def factor(self, name):
        return jnp.where(self.mark == FAULTS[name][0], 1.01, 1.0)

    def wrong_gradient(self, name, x):
        factor = self.factor(name)

        @jax.custom_vjp
        def same(x, factor):
            return x

        same.defvjp(lambda x, factor: (x, factor), lambda factor, g: (g * factor, 0 * factor))
        return same(x, factor)

    def planted(self):
        faults = self

        def block_call(self, *inputs):
            faults.mark = self.attention_norm.scale[...][0]
            return faults.call(self, *inputs)

        def attend(query, *others):
            query = faults.wrong_gradient("gradient of attention", query)
            return faults.attend(query, *others) * faults.factor("context")

        def activate(function, gate_up):
            gate_up = [faults.wrong_gradient("gradient of the MLP", each) for each in gate_up]
            return faults.activate(function, gate_up) * faults.factor("hidden")

        def rotate(*inputs, **factors):
            return faults.rotate(*inputs, **factors) * faults.factor("rotation")

        stack = mock.patch.multiple(attention, attend=attend, rotate=rotate)
        return (
            stack,
            mock.patch.multiple(mlp, apply_activation=activate),
            mock.patch.object(block.Block, "__call__", block_call),
        )


@pytest.fixture(scope="module")
def faulty():
    """The program with the faults; its settings name the same arrays in another way."""
    of = dataclasses.replace(PLAIN, dump=Dump(arrays=("*", "forward/*")))
    first, second, third = Faults().planted()
    with first, second, third:
        loaded(of, "dump")
    return of


@pytest.mark.parametrize("layer", range(LLAMA.layers))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_constant_is_the_first_difference(faulty, fault, layer, tmp_path):
    mark, expected, file = FAULTS[fault]
    state = jax.tree.map(np.copy, state_of(PLAIN))
    state["parameters"]["layers"]["attention_norm"]["scale"][layer, 0] = mark
    lines = {fact["name"]: fact["lines"] for fact in loaded(PLAIN, "dump").record["dump"]["arrays"]}
    right = stored(tmp_path / "right", dumped(PLAIN, state), lines)
    wrong = stored(tmp_path / "wrong", dumped(faulty, state), lines)
    first = compare_dumps(right, wrong).first
    assert first is not None and first.name == expected.format(layer)
    assert any(os.path.basename(line.partition(":")[0]) == file for line in first.lines)
    assert first.relative == pytest.approx(0.01, rel=0.1)
