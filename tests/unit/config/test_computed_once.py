"""Values of a program that are computed once (graphtrain/config/computed_once.py)."""

import pickle
from dataclasses import replace

import pytest

from graphtrain.config.computed_once import computed_once
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Batch, Model, Program


@pytest.fixture
def program() -> ResolvedProgram:
    model = Model(layers=1, embed=8, heads=2, mlp=8, vocab=8)
    return resolve(Program(model=model, batch=Batch(global_batch_size=2, seq_len=8)))


def test_a_value_is_computed_once_for_a_program_and_each_option(program):
    calls = []

    @computed_once
    def twice(program: ResolvedProgram, *, factor: int = 2) -> int:
        calls.append(factor)
        return factor * program.batch.seq_len

    assert twice(program) == twice(program) == 2 * program.batch.seq_len
    assert twice(program, factor=3) == 3 * program.batch.seq_len
    assert calls == [2, 3]


def test_another_program_and_another_process_compute_anew(program):
    seq_len = computed_once(lambda program: program.batch.seq_len)
    longer = replace(program.settings, batch=replace(program.batch, seq_len=1024))
    assert seq_len(program) != 1024 and seq_len(program.with_settings(longer)) == 1024
    sent = pickle.loads(pickle.dumps(program))
    assert sent == program and program.computed and not sent.computed


def test_an_error_is_raised_each_time(program):
    calls = []

    @computed_once
    def fail(program: ResolvedProgram) -> None:
        calls.append(program)
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fail(program)
    assert len(calls) == 2
