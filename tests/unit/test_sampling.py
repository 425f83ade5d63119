"""The choice of the next token from the logits."""

import numpy as np
import pytest

from graphtrain.errors import TrainingError
from graphtrain.run.generate import check_finite


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused_with_the_weights_named(bad):
    scores = np.array([0.5, bad, -1.0], np.float32)
    with pytest.raises(TrainingError, match="weights in runs/a/checkpoints/5 give logits that are"):
        check_finite(scores, "runs/a/checkpoints/5")


def test_tokens_that_cannot_occur_may_have_minus_infinity():
    check_finite(np.array([0.5, -np.inf], np.float32), "converted")
