"""Problems of images: a row without room for them, documents with images that no row can take."""

import warnings
from collections.abc import Iterator

from graphtrain.api.checks.problem import Problem
from graphtrain.config.lines import KeyPath
from graphtrain.config.schema import Config
from graphtrain.data.batches.row_images import image_problem
from graphtrain.data.batches.rows import PackingSettings
from graphtrain.data.indexed.description import DatasetDescription
from graphtrain.errors import DataError, ImportedModelError
from graphtrain.run.training_data import row_images

_IMAGES = ("program", "model", "images")
_SEQ_LEN = ("program", "batch", "seq_len")


def room_problems(config: Config, *, saved: bool = False) -> Iterator[Problem]:
    """Yield that no row can ever hold as many images as the program computes for each.

    That wastes time and memory, and is no error in a run that trained so before (`saved`).
    """
    try:
        images = row_images(config.program)
    except ImportedModelError:  # reported where the model is opened
        return
    if images is None:
        return
    program = config.program
    length = max(program.batch.seq_len, *(phase.seq_len or 0 for phase in program.phases), 0)
    if images.images * images.tokens > length:
        message = (
            f"program.model.images = {images.images}, but a row of program.batch.seq_len = "
            f"{length} tokens holds at most {length // images.tokens} images of {images.tokens} "
            "tokens each; set images to at most that, or increase seq_len"
        )
        yield Problem("data_doubt" if saved else "program", message, (_IMAGES, _SEQ_LEN))


def image_data_problems(
    config: Config, prefix: str, setting: KeyPath, description: DatasetDescription | None
) -> Iterator[Problem]:
    """Yield why a program does not take a dataset: its images, or its lengths and their packing."""
    images, rows = description.images if description else None, row_images(config.program)
    name = ".".join(setting)
    if (problem := image_problem(images, rows)) is not None:
        settings = setting, ("run", "data", "directory"), _IMAGES
        yield Problem("data", f"{name}: {prefix} {problem}", settings)
        return
    if images is None:
        return
    batch, data = config.program.batch, config.run.data
    settings = PackingSettings(
        length=batch.seq_len,
        isolate_documents=not batch.cross_document_attention,
        # Which documents a row takes does not depend on how they are packed, which may take long.
        packing="pad" if data.packing != "concat" else data.packing,
        overlong=data.overlong,
        images=rows,
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # the run warns of what it leaves out
            settings.open(prefix)
    except DataError as error:
        yield Problem("data", f"{name}: {error}", (setting, ("run", "data", "overlong"), _SEQ_LEN))
