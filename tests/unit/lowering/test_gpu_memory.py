"""The share of a GPU's memory: the plan judges by what the allocator of a run reserves."""

import json
import os
import subprocess
import sys

import pytest

from graphtrain.compile.memory_check import check_fits
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Model, Program
from lowering.errors import LoweringError, OutOfMemory
from lowering.machine.gpu_memory import POOL_FRACTION, VARIABLE, pool_fraction
from lowering.machine.target import Target

DEPRECATED = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# In a new process, because JAX reads the variables once.
RESERVED = """
import json
from lowering.machine.target import Target
from lowering.xla import backend
backend.compile_devices(Target.parse("cpu:1"))
from jaxlib import xla_client
fraction = xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"]
print(json.dumps([fraction, Target.parse("h100:8").usable_memory_bytes]))
"""


@pytest.mark.parametrize(
    ("setting", "expected"),
    [({}, POOL_FRACTION), ({VARIABLE: "0.5"}, 0.5), ({DEPRECATED: "0.625"}, 0.625)],
)
def test_the_allocator_reserves_the_share_that_a_plan_judges_by(setting, expected):
    others = {name: v for name, v in os.environ.items() if name not in (VARIABLE, DEPRECATED)}
    finished = subprocess.run(
        [sys.executable, "-c", RESERVED], env=others | setting, capture_output=True, check=True
    )
    assert json.loads(finished.stdout) == [expected, int(80e9 * expected)]


@pytest.mark.parametrize("value", ["most", "0", "-1", "nan"])
def test_a_share_that_is_no_number_is_named(value):
    with pytest.raises(LoweringError, match=f"{VARIABLE}={value}"):
        pool_fraction({VARIABLE: value})


def test_only_gpus_have_a_pool(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(DEPRECATED, raising=False)
    assert Target.parse("v5p:2x2x1").usable_memory_bytes == 95e9
    assert Target.parse("h100:1").usable_memory_bytes == 72e9


def test_a_step_between_the_pool_and_the_device_does_not_fit(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0.9")
    model = Model(layers=1, embed=64, heads=1, mlp=64, vocab=64)
    program = resolve(
        Program(target="h100:1", model=model, batch=Batch(global_batch_size=1, seq_len=128))
    )
    check_fits(program, {"graph": "train", "memory": {"peak": 71_000_000_000}})
    with pytest.raises(OutOfMemory, match=r"77\.2 GB.* 72\.0 GB of a device's 80\.0 GB"):
        check_fits(program, {"graph": "train", "memory": {"peak": 77_200_000_000}})
