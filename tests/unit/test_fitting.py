"""What is said of a program that its device cannot hold."""

from dataclasses import replace

from graphtrain.compile.memory_check import with_largest_arrays
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Model, Program, TorchModel
from lowering.errors import OutOfMemory
from lowering.machine.target import Target

PROGRAM = Program(
    target="h100:1",
    model=Model(layers=1, embed=8, heads=2, mlp=16, vocab=32),
    batch=Batch(global_batch_size=8, seq_len=8),
)


def error(graph: str = "train") -> OutOfMemory:
    return OutOfMemory(graph, Target.parse("h100:1"), "RESOURCE_EXHAUSTED: no room")


def test_what_takes_most_is_named_by_an_estimate():
    assert "estimated largest: " in str(with_largest_arrays(error(), resolve(PROGRAM)))


def test_a_module_whose_sizes_nothing_tells_is_not_made_for_it():
    program = replace(PROGRAM, model=TorchModel(torch="nowhere:model", vocab=32))
    assert str(with_largest_arrays(error(), resolve(program))) == str(error())
