"""Loader of a run's training data."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphtrain.config.hf_images import image_layout
from graphtrain.config.schema import Program, Run, TorchModel
from graphtrain.data.batches.row_images import RowImages
from graphtrain.run.batch_placement import index_share
from graphtrain.run.data_sources import open_sources
from graphtrain.run.streaming.open import open_streams


def training_loader(run: Run, program: Program, rows: np.ndarray | None) -> Any:
    """Open the training data of a run as an iterator over its batches, which must be closed.

    Args:
        run: settings of the run.
        program: settings of the program.
        rows: rows of each batch to read, ascending; None: all.

    Raises:
        DataError: a dataset cannot be used.
    """
    from graphtrain.data.batches.loader import Loader

    return Loader(
        run.data.local.train,
        global_batch_size=program.batch.global_batch_size,
        padding_sequences=program.batch.padding_sequences,
        seq_len=program.batch.seq_len,
        seed=run.seed,
        vocab=program.model.vocab_tokens,
        isolate_documents=not program.batch.cross_document_attention,
        packing=run.data.packing,
        overlong=run.data.overlong,
        pairs=program.loss.kind == "dpo",
        rows=rows,
        index_share=index_share(),
        sources=open_sources(run.data),
        streams=open_streams(run.data),
        images=row_images(program),
    )


def row_images(program: Program) -> RowImages | None:
    """Return the images that a program takes with each row; None if it takes none.

    Raises:
        ImportedModelError: config.json of the model is not that of a model of text and images.
    """
    layout = image_layout(program.model) if isinstance(program.model, TorchModel) else None
    return layout and RowImages.of(layout.images, layout)
