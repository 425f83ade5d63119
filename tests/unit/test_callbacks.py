"""Callbacks are called by name, and their errors name them."""

import pytest

import graphtrain as gt
from graphtrain.run.callbacks import EVENTS, check_callbacks, notify


class Losses:
    def __init__(self):
        self.seen = []

    def on_step(self, step, metrics):
        self.seen.append((step, metrics["loss"]))


class Broken(gt.Callback):
    def on_step(self, step, metrics):
        raise ValueError("disk full")


def test_the_events_are_those_of_the_protocol():
    assert EVENTS == ("on_run_start", "on_step", "on_evaluate", "on_checkpoint", "on_run_end")


def test_a_callback_needs_only_some_methods():
    losses = Losses()
    check_callbacks([losses])
    notify([losses], "on_step", 3, {"loss": 2.0})
    notify([losses], "on_run_end", None)
    assert losses.seen == [(3, 2.0)]


def test_an_exception_names_the_callback_and_the_event():
    message = r"callback Broken\.on_step raised ValueError: disk full"
    with pytest.raises(gt.errors.CallbackError, match=message) as raised:
        notify([Broken()], "on_step", 1, {})
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_misspelt_method_is_refused():
    class Misspelt:
        def on_steps(self, step, metrics): ...

    with pytest.raises(gt.errors.CallbackError, match="no event on_steps; did you mean on_step"):
        check_callbacks([Misspelt()])
    with pytest.raises(gt.errors.CallbackError, match="callback print has none of the methods"):
        check_callbacks([print])
