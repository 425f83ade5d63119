"""A wrong operator in the lowering for Ascend is the first difference between two dumps."""

from unittest import mock

import numpy as np
import pytest
from programs import batch, program, state_of
from test_dump import PLAIN, RATE, dumped, stored
from test_graphs import compiled

from graphtrain.config.resolve import resolve
from graphtrain.run.dumps.compare import compare_dumps
from graphtrain.run.dumps.host_arrays import host_arrays
from lowering.ascend import operations
from lowering.ascend.emitter import NUMPY
from lowering.ascend.per_rank import fill_in_rank
from lowering.trees import flatten, unflatten


def run_on_ascend(mindspore, path):
    """Compile the dump of one step, run it in MindSpore, and return its arrays by name."""
    artifact = compiled(program(), "dump", "ascend-cpu:1")
    record, about = artifact.record, artifact.record["ascend"]
    path.write_bytes(fill_in_rank(artifact.payload, about["groups"], about["exchanges"], 0, "CPU"))
    values = {
        **flatten(state_of(PLAIN), "state"),
        **flatten(batch(PLAIN), "batch"),
        "learning_rate": RATE,
    }
    inputs = [
        path
        for name in record["arguments"]
        for path in record["inputs"]
        if path == name or path.startswith(f"{name}/")
    ]
    tensors = [
        mindspore.Tensor(np.asarray(values[name]).astype(NUMPY[dtype]))
        for name, (_, dtype) in zip(inputs, about["stored"], strict=True)
    ]
    held = {f"input{number}": tensors[number] for number in about["variables"]}
    net = mindspore.nn.GraphCell(mindspore.load(str(path)), params_init=held)
    given = [one for n, one in enumerate(tensors) if n not in about["variables"]]
    returned = dict(zip(about["returned"], net(*given), strict=True))
    updated = net.parameters_dict()  # outputs in the memory of inputs
    returned |= {output: updated[f"input{number}"] for output, number in about["aliases"]}
    outputs = {
        name: returned[n].asnumpy().reshape(fact["shape"])
        for n, (name, fact) in enumerate(record["outputs"].items())
    }
    return host_arrays(resolve(program()), record, unflatten(outputs))


@pytest.mark.parametrize(
    ("opcode", "operator", "first"),
    [
        (None, None, None),
        ("cosine", ("Sin", np.sin), "forward/layers/0/attention/rotated_query"),
    ],
    ids=["right", "wrong"],
)
def test_the_first_difference_is_where_the_operator_is(
    mindspore, tmp_path, opcode, operator, first
):
    wrong = {opcode: operator} if opcode else {}
    with mock.patch.dict(operations.UNARY, wrong):
        theirs = run_on_ascend(mindspore, tmp_path / "dump.mindir")
    a = stored(tmp_path / "cpu", dumped(PLAIN), {})
    b = stored(tmp_path / "ascend", theirs, {})
    found = compare_dumps(a, b).first
    assert (found and found.name) == first
