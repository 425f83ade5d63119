"""What `graphtrain plan --blame` says where it has no collective to explain."""

from dataclasses import replace

import pytest
from in_process import graphtrain

from graphtrain.planning.answer import Answer
from graphtrain.planning.assess import estimate


@pytest.mark.parametrize(
    ("source", "peak", "status", "shown"),
    [
        ("compiler", 1, 0, "the compiled step has no collectives"),
        ("estimate", 1, 2, "--blame needs a compiled step, and there is none: no libtpu"),
        ("estimate", 10**15, 4, "--blame needs a compiled step, and there is none: no libtpu"),
    ],
)
def test_blame_without_causes_says_why(vary, monkeypatch, tmp_path, source, peak, status, shown):
    program = vary([])
    guess = estimate(program)
    memory = replace(guess.memory, peak=peak)
    assessment = replace(
        guess, memory=memory, collectives=(), collectives_source=source, note="no libtpu"
    )
    answer = Answer(program, assessment, {})
    monkeypatch.setattr("graphtrain.api.programs.plan", lambda *_, **__: answer)
    outcome = graphtrain("plan", str(tmp_path / "config.toml"), "--blame")
    assert outcome.status == status
    assert shown in outcome.out + outcome.err
