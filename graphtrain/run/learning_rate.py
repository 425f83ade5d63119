"""Learning rate schedule. The host computes the rate; it is an input of the compiled step."""

import math
from bisect import bisect_left

from graphtrain.config.schema import LearningRate


def learning_rate(schedule: LearningRate, steps: int, step: int) -> float:
    """Return the learning rate of one step.

    The rate rises linearly and reaches the peak at the last warm-up step. Then it follows the
    schedule; if this decays until the end, the last step of the run uses the minimum.

    Args:
        schedule: Settings.
        steps: Number of steps of the entire run.
        step: Index of the step, from 0 to steps - 1.

    Source: cosine: Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, equation 5.
    inverse_sqrt: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 3. wsd: Hu et al.
    2024, https://arxiv.org/abs/2404.06395, section 4; its decay styles: Hägele et al. 2024,
    https://arxiv.org/abs/2405.18392, section 4.
    """
    completed_steps = step + 1
    if completed_steps <= schedule.warmup_steps:
        return schedule.peak * completed_steps / schedule.warmup_steps
    if schedule.schedule == "inverse_sqrt":
        rate = schedule.peak * math.sqrt(schedule.warmup_steps / completed_steps)
        return max(rate, schedule.minimum)
    if schedule.schedule == "piecewise":
        return schedule.peak * _factor(schedule, completed_steps)
    remaining = _remaining(schedule, steps, completed_steps)
    if remaining == 1:
        return schedule.peak  # without rounding
    return schedule.minimum + (schedule.peak - schedule.minimum) * remaining


def _factor(schedule: LearningRate, completed_steps: int) -> float:
    """Return the factor after the last boundary before a step."""
    assert schedule.boundaries is not None and schedule.factors is not None
    return (1.0, *schedule.factors)[bisect_left(schedule.boundaries, completed_steps)]


def _remaining(schedule: LearningRate, steps: int, completed_steps: int) -> float:
    """Return the part of the way from the minimum to the peak: 1 before the decay, 0 at its end."""
    style, power = schedule.schedule, 1.0
    if style == "constant":
        return 1.0
    decaying = steps - schedule.warmup_steps
    if style == "wsd":
        style, decaying = schedule.decay_style or "sqrt", schedule.steps_of_decay(steps)
    elif style == "polynomial":
        power = schedule.power or 1.0
    progress = max(0.0, (completed_steps - (steps - decaying)) / decaying)
    if style == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if style == "sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress if power == 1 else (1 - progress) ** power
