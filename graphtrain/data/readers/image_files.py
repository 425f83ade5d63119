"""Reading of image files, within limits, as transformers reads them."""

import warnings
from pathlib import Path
from typing import Any

from graphtrain.errors import DataError
from lowering.machine.extras import optional_import

# Decoders that are used. Pillow has others, some of which run programs (EPS).
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Modes whose conversion to RGB keeps 8 bits of a channel; of more bits, Pillow cuts off the values.
_MODES = ("1", "CMYK", "L", "LA", "P", "PA", "RGB", "RGBA", "YCbCr")
_MAX_BYTES = 1 << 28  # of a file
_MAX_PIXELS = 1 << 26  # of an image; 200 MB when it is decoded


def read_image(path: Path, place: str) -> Any:
    """Return the image of a file as RGB, turned as its EXIF orientation says.

    Args:
        path: The file.
        place: File and line of the record that names it, for messages.

    Returns:
        A `PIL.Image.Image`, as `load_image` of transformers returns it.

    Raises:
        DataError: the file is missing, is not an image, is damaged, too large or has more than 8
            bits for each channel; the message begins with the place.
    """
    with optional_import("an image"):
        from PIL import Image, ImageOps

    check_image_file(path, place)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(path, formats=_FORMATS)
        with opened as image:
            _check_header(image, f"{place}: {path}")
            return ImageOps.exif_transpose(image).convert("RGB")
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"{place}: {path}: {_too_many_pixels()}") from None
    except Exception as error:  # of a decoder, which may raise anything
        message = str(error).replace(str(path), "the file") or type(error).__name__
        raise DataError(
            f"{place}: {path}: cannot be decoded ({message[:200]}); graphtrain reads "
            f"{', '.join(_FORMATS)}"
        ) from None


def check_image_file(path: Path, place: str) -> None:
    """Check that a file exists and is not too large.

    Raises:
        DataError: it does not, or is; the message begins with the place.
    """
    if not path.is_file():
        raise DataError(
            f"{place}: {path}: no such file; paths of images are relative to the file of the record"
        )
    if (nbytes := path.stat().st_size) > _MAX_BYTES:
        raise DataError(
            f"{place}: {path}: has {nbytes / 1e6:.0f} MB, more than the limit of "
            f"{_MAX_BYTES / 1e6:.0f} MB for an image"
        )


def _check_header(image: Any, where: str) -> None:
    """Check an image before it is decoded."""
    if image.width * image.height > _MAX_PIXELS:
        raise DataError(f"{where}: {_too_many_pixels()}")
    if image.mode not in _MODES:
        raise DataError(
            f"{where}: has the mode {image.mode}, whose values do not fit into 8 bits for each "
            "channel; convert it to RGB"
        )
    if _has_deep_channels(image):
        raise DataError(
            f"{where}: has 16 bits for each channel, of which only 8 would be read; save it with 8"
        )
    if (
        getattr(image, "is_animated", False) and image.format != "MPO"
    ):  # of an MPO, the first counts
        raise DataError(f"{where}: has {image.n_frames} frames; save one of them as an image")


def _has_deep_channels(image: Any) -> bool:
    """Return whether a file stores 16 bits for each channel of a mode of 8 bits, as a PNG may.

    Pillow tells its decoder how values are stored ("RGB;16B") or, in a PPM, the largest of them.
    "BGR;16" is a BMP with 16 bits for each pixel: 5, 6 and 5 of the channels.
    """
    arguments = [part for tile in getattr(image, "tile", ()) for part in _as_tuple(tile[3])]
    largest = [part for part in arguments if image.format == "PPM" and isinstance(part, int)]
    is_deep = any(
        isinstance(part, str) and ";16" in part and part != "BGR;16" for part in arguments
    )
    return is_deep or max(largest, default=0) > 255


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _too_many_pixels() -> str:
    return (
        f"has more than {_MAX_PIXELS / 1e6:.0f} million pixels, the limit; make the image smaller"
    )
