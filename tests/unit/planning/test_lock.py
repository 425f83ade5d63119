import dataclasses

import pytest

from graphtrain.errors import PlanError
from graphtrain.planning.assess import estimate
from graphtrain.planning.lock import lock_diff, lock_text


def test_a_lock_of_the_same_plan_holds(vary):
    assert lock_diff(lock_text(estimate(vary([]))), estimate(vary([]))) == []


def test_a_lock_names_the_arrays_memory_and_collectives_that_changed(vary):
    locked = lock_text(estimate(vary([])))
    told = lock_diff(locked, estimate(vary(["program.mesh={tensor=4}"])))
    assert "-mesh  fsdp=4" in told and "+mesh  tensor=4" in told
    assert any(line.startswith("+state/parameters/layers/mlp/up  float32  4x512x") for line in told)
    assert any(line.startswith("-fsdp  all-gather") for line in told)
    assert any(line.startswith("+peak  ") for line in told)


def test_a_new_toolchain_that_changes_nothing_is_fine(vary):
    locked = lock_text(estimate(vary([]))).replace(
        "# made with jax ", "# made with jax 0.0.1, old "
    )
    assert lock_diff(locked, estimate(vary([]))) == []


def test_a_new_toolchain_is_named_beside_what_it_may_have_changed(vary):
    locked = lock_text(estimate(vary([]))).replace(
        "# made with jax ", "# made with jax 0.0.1, old "
    )
    told = lock_diff(locked, estimate(vary(["program.batch.global_batch_size=32"])))
    assert any(line.startswith("-# made with jax 0.0.1") for line in told)


def test_blanks_and_blank_lines_do_not_count(vary):
    locked = lock_text(estimate(vary([]))).replace("  ", " ").replace("\n\n", "\n")
    assert lock_diff(locked, estimate(vary([]))) == []


def test_an_estimate_is_never_compared_with_a_compiler(vary):
    assessment = estimate(vary([]))
    memory = dataclasses.replace(assessment.memory, source="compiler")
    locked = lock_text(dataclasses.replace(assessment, memory=memory))
    with pytest.raises(PlanError, match="from the compiler and this plan is from the estimate"):
        lock_diff(locked, assessment)


def test_where_a_collective_comes_from_is_not_locked(vary):
    assessment = estimate(vary([]))
    moved = tuple(
        dataclasses.replace(one, source="elsewhere.py:1") for one in assessment.collectives
    )
    assert (
        lock_diff(lock_text(assessment), dataclasses.replace(assessment, collectives=moved)) == []
    )


@pytest.mark.parametrize("damage", [lambda text: "", lambda text: text[: len(text) // 2]])
def test_a_damaged_lock_is_said_to_be_damaged(vary, damage):
    assessment = estimate(vary([]))
    with pytest.raises(PlanError, match=r"the lock is damaged: .* write it again: graphtrain plan"):
        lock_diff(damage(lock_text(assessment)), assessment)
