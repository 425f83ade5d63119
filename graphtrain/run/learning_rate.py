"""Learning rate schedule. The host computes the rate; it is an input of the compiled step."""

import math

from graphtrain.config.schema import LearningRate


def learning_rate(schedule: LearningRate, steps: int, step: int) -> float:
    """Return the learning rate of one step.

    The rate rises linearly and reaches the peak at the last warm-up step. It then decays, so that
    the last step of the run uses the floor, or stays at the peak if the shape is constant.

    Args:
        schedule: Peak, floor, number of warm-up steps, and shape of the decay.
        steps: Number of steps of the entire run.
        step: Index of the step, from 0 to steps - 1.

    Source: Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, equation 5
    """
    completed_steps = step + 1
    if completed_steps <= schedule.warmup_steps:
        return schedule.peak * completed_steps / schedule.warmup_steps
    if schedule.schedule == "constant":
        return schedule.peak
    progress = (completed_steps - schedule.warmup_steps) / (steps - schedule.warmup_steps)
    decay_factor = (
        1 - progress if schedule.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    )
    return schedule.minimum + (schedule.peak - schedule.minimum) * decay_factor
