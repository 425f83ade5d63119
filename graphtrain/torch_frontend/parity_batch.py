"""Random tokens, and images between them, on which a model is compared with eager PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphtrain.config.hf_images import image_layout

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

_MOST_IMAGES = 2  # of a row


def comparison_batch(
    model: TorchModel, tokens: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return token ids (batch, seq + 1), and uint8 images; None if the model takes none.

    Rows with images are longer by their placeholders. All but the first have one image less, so
    that the images of a row are told from those of its neighbours.

    Args:
        model: settings.
        tokens: rows, and tokens of text in each.
    """
    random, layout, vocab = np.random.default_rng(0), image_layout(model), model.vocab
    assert vocab is not None
    count = 0 if layout is None else min(_MOST_IMAGES, layout.images)
    length = tokens[1] + 1 + count * (layout.tokens if layout else 0)
    batch = random.integers(0, vocab, (tokens[0], length), np.int32)
    # A too small embedding fails in PyTorch; JAX would not notice.
    batch[0, 0] = vocab - 1
    if layout is None:
        return batch, None
    batch = np.where(batch == layout.token, (layout.token + 1) % vocab, batch).astype(np.int32)
    for row in range(len(batch)):
        for number in range(count if row == 0 else count - 1):
            begin = 2 + number * (layout.tokens + 1)  # one token of text after each image
            batch[row, begin : begin + layout.tokens] = layout.token
    shape = (len(batch), layout.images, layout.height, layout.width, 3)
    return batch, random.integers(0, 256, shape, np.uint8)
