"""The learning rate, computed by the host: it is an input of the step, never in its code."""

import math

from graphtrain.config.schema import Schedule


def learning_rate(schedule: Schedule, steps: int, step: int) -> float:
    """The learning rate of one step.

    It rises linearly to reach the peak at the last step of the warm-up, and falls so that the last
    step has the floor.

    Args:
        steps: of the whole run.
        step: from 0 to steps - 1.

    Source: Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, equation 5
    """
    done = step + 1
    if done <= schedule.warmup:
        return schedule.peak * done / schedule.warmup
    if schedule.shape == "constant":
        return schedule.peak
    progress = (done - schedule.warmup) / (steps - schedule.warmup)
    left = 1 - progress if schedule.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return schedule.floor + (schedule.peak - schedule.floor) * left
