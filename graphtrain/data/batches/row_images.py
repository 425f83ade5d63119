"""Images that the rows of a batch have room for, and whether a dataset suits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from graphtrain.data.indexed.images import ImageSettings
from graphtrain.errors import DataError


class ImageSizes(Protocol):
    """Sizes of each image, as a dataset or a model states them."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class RowImages:
    """Images that a program takes with each row of a batch."""

    images: int  # of a row, at most
    height: int  # in pixels
    width: int
    token: int  # id of the placeholder
    tokens: int  # placeholders of an image

    @classmethod
    def of(cls, images: int, each: ImageSizes) -> RowImages:
        """Return room for so many images of these sizes."""
        return cls(
            images=images,
            height=each.height,
            width=each.width,
            token=each.token,
            tokens=each.tokens,
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the images of a row: images, height, width, channels."""
        return self.images, self.height, self.width, 3


def check_images(prefix: str, images: ImageSettings | None, rows: RowImages | None) -> None:
    """Check that a program takes the images of a dataset.

    Args:
        prefix: Path prefix of the dataset, for the message.
        images: Images of the dataset. None: it has none.
        rows: Images that the program takes. None: it takes none.

    Raises:
        DataError: the program takes none, needs some, or others; says what to set.
    """
    problem = image_problem(images, rows)
    if problem is not None:
        raise DataError(f"{prefix} {problem}")


def image_problem(images: ImageSettings | None, rows: RowImages | None) -> str | None:
    """Say why a program does not take the images of a dataset, and what to set; None if it does.

    The dataset is the subject of the sentence.
    """
    if rows is None:
        return images and (
            "was prepared with --processor, for images, but program.model.images = 0; set it to at "
            f"least {max(1, images.most)}, with program.model.image_size = [{images.height}, "
            f"{images.width}] (a document has up to {images.most} images), or use a dataset of text"
        )
    if images is None:
        return (
            f"has no images, but program.model.images = {rows.images}; prepare it with graphtrain "
            "data instruct --processor FOLDER, or set program.model.images = 0"
        )
    if (images.height, images.width) != (rows.height, rows.width):
        return (
            f"has images of {images.height} x {images.width} pixels (height x width), but the "
            f"program takes {rows.height} x {rows.width}; set program.model.image_size = "
            f"[{images.height}, {images.width}], or prepare the dataset with --image-size "
            f"{rows.height} {rows.width}"
        )
    if (images.token, images.tokens) != (rows.token, rows.tokens):
        return (
            f"has {images.tokens} tokens of id {images.token} for an image, but the model needs "
            f"{rows.tokens} of id {rows.token}; prepare the dataset with --processor and the "
            "folder of the model. If it was, patch_size, num_additional_image_tokens and "
            "vision_feature_select_strategy in its processor_config.json do not fit its config.json"
        )
    return None
