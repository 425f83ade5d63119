"""Each of several processes reads the rows of a batch that its devices hold, and only those."""

import json
import socket
import subprocess
import sys

import pytest

RANK = """
import itertools, json, sys
import numpy as np
from graphtrain.data.batches.concat_packing import ConcatPacking
from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.batches.loader import Loader
from graphtrain.run.batch_placement import BatchPlacement, index_share
from lowering.machine.target import Target
from lowering.xla import backend, joining
from sharding_rules.mesh import MeshShape

data, address, rank, target, mesh, split, shape = map(json.loads, sys.argv[1:])
target = Target.parse(target)
member = joining.Membership(rank, target.processes, address)
joining.initialize(member, target, join_timeout=60)
import jax
mesh = backend.make_mesh(MeshShape(mesh), backend.devices(target))
split = jax.sharding.PartitionSpec(*(tuple(axes) or None for axes in split))
sharding = jax.sharding.NamedSharding(mesh, split)
dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
described = {name: jax.ShapeDtypeStruct(shape, dtypes[name], sharding=sharding) for name in dtypes}
# Images have more dimensions after the rows, which no axis splits.
dtypes["images"], image_shape = np.uint8, [2, 1, 4, 3]
rows_sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*split[:-1]))
described["images"] = jax.ShapeDtypeStruct(
    [*shape[:-1], *image_shape], np.uint8, sharding=rows_sharding
)
def with_images(batch):
    factors = np.arange(1, 1 + np.prod(image_shape))
    images = batch["tokens"][:, :1] * factors + batch["tokens"][:, 1:2]
    return {**batch, "images": (images % 251).astype(np.uint8).reshape(-1, *image_shape)}

read, slices_of = set(), ConcatPacking._document_slices
def noted(packing, index):
    read.add(int(index))
    return slices_of(packing, index)
ConcatPacking._document_slices = noted

placement = BatchPlacement(described, target)
settings = {"global_batch_size": 8, "seq_len": 6, "seed": 3}
def placed(batches):
    for batch in batches:
        assert {len(array) for array in batch.values()} == {len(placement.rows)}
        yield placement.to_devices(with_images(batch))
loader = Loader(data, **settings, rows=placement.rows, index_share=index_share())
trained = list(placed(itertools.islice(loader, 5)))
own = {int(i) for step in range(40) for _, i in loader._samples_of(step, placement.rows)}
loader.close()
strangers = len(read - own)
options = {"batch_size": 8, "seq_len": 6}
validated = list(placed(evaluation_batches(data, **options, rows=placement.rows)))

whole = Loader(data, **settings)
wanted = list(itertools.islice(whole, 5))
whole.close()
wanted_validated = list(evaluation_batches(data, **options))
for got, want in zip(trained + validated, wanted + wanted_validated, strict=True):
    for name, array in got.items():
        assert array.shape == described[name].shape and array.dtype == dtypes[name]
        for shard in array.addressable_shards:
            expected = with_images(want)[name].reshape(array.shape)[shard.index]
            np.testing.assert_array_equal(np.asarray(shard.data), expected)
print(json.dumps({"rows": placement.rows.tolist(), "strangers": strangers, "read": len(read)}))
"""


@pytest.mark.parametrize(
    ("target", "mesh", "split", "shape", "expected"),
    [
        pytest.param(
            "cpu:2x2", {"data": 4}, [["data"], []], [8, 6],
            [[0, 1, 2, 3], [4, 5, 6, 7]], id="data",
        ),
        pytest.param(
            "cpu:2x2", {"data": 4}, [[], ["data"], []], [2, 4, 6],
            [[0, 1, 4, 5], [2, 3, 6, 7]], id="microbatches",
        ),
        pytest.param(
            "cpu:2x2", {"data": 2, "context": 2}, [["data"], ["context"]], [8, 6],
            [[0, 1, 2, 3], [4, 5, 6, 7]], id="context",
        ),
        pytest.param(
            "cpu:4x1", {"data": 2, "tensor": 2}, [["data"], []], [8, 6],
            [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]], id="tensor-over-hosts",
        ),
    ],
)  # fmt: skip
def test_each_process_reads_the_rows_that_its_devices_hold(
    make_dataset, target, mesh, split, shape, expected
):
    data = make_dataset([[100 * i + j for j in range(3 + i % 5)] for i in range(40)], 4001)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [
                sys.executable, "-c", RANK,
                *map(json.dumps, [str(data), address, rank, target, mesh, split, shape]),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(expected))
    ]  # fmt: skip
    ended = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(expected), ended
    told = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    assert [one["rows"] for one in told] == expected
    assert all(one["strangers"] == 0 and one["read"] for one in told)
