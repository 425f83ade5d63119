import dataclasses
from importlib.util import find_spec

import pytest
from programs import program

from graphtrain.compile.worker import lower
from graphtrain.config.resolve import resolve
from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.xla import backend as xla


def test_a_program_for_another_processor_is_refused():
    artifact = xla.compile(lower(resolve(program()), "evaluate"))
    other = dataclasses.replace(artifact, record=artifact.record | {"fingerprint": "0" * 16})
    with pytest.raises(
        LoweringError, match=r"compiled for another processor .* compile it for this machine"
    ):
        xla.load(other, Target.parse("cpu:1"))


def test_more_devices_than_the_process_has_are_refused():
    with pytest.raises(LoweringError, match=r"cpu:64 needs 64 devices; JAX has 8 in this process"):
        xla.devices(Target.parse("cpu:64"))


@pytest.mark.parametrize("target", ["h200:1", "mi300x:8", "v5e:2x4"])
def test_a_machine_that_is_not_here_cannot_run(target):
    with pytest.raises(
        LoweringError, match=rf"^{target}: JAX finds no \w+ device on this machine .* it requires "
    ):
        xla.devices(Target.parse(target))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="no libtpu")
@pytest.mark.parametrize("target", ["v4:2x2x1", "v5e:1x1", "v5e:1x2", "v5p:2x2x2", "tpu7x:2x2x1"])
def test_a_tpu_is_described_by_its_devices(target):
    parsed = Target.parse(target)
    assert len(xla.compile_devices(parsed)) == parsed.devices
