"""Names of operations, as JAX and XLA write them."""

import pytest

from graphtrain.planning.scopes import Scope, scopes

LAYER = "while/body/closed_call"


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        (
            f"jit(train)/jvp()/{LAYER}/mlp/down/bsm,me->bse/dot_general",
            Scope(("mlp", "down"), "dot_general", "forward", ("bsm", "me", "bse")),
        ),
        (
            f"jit(train)/transpose(jvp())/{LAYER}/checkpoint/rematted_computation/norm/mul",
            Scope(("norm",), "mul", "recomputation"),
        ),
        (
            "jit(train)/transpose(jvp(vmap(embedding)))/jit(_take)/scatter-add",
            Scope(("embedding",), "scatter-add", "backward"),
        ),
        ("jit(train)/add", Scope((), "add", "update")),
    ],
)
def test_a_name_tells_modules_pass_and_einsum(text, scope):
    assert scopes(text) == (scope,)


def test_a_combined_operation_has_the_names_of_all():
    text = f"jit(train)/transpose(jvp())/{LAYER}/mlp/(up/bse,bsm->em/dot_general:norm/reduce_sum)"
    up, norm = scopes(text)
    assert (up.names, up.phase, up.contracted) == (("mlp", "up"), "backward", "bs")
    assert (norm.names, norm.operation) == (("mlp", "norm"), "reduce_sum")


def test_names_that_end_in_a_parenthesis_are_not_combined():
    (scope,) = scopes("jit(train)/transpose(jvp(loss))")
    assert scope.operation == "transpose(jvp(loss))"


def test_no_name_tells_nothing():
    assert scopes("") == ()
