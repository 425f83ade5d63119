"""Vision tower of a program with images, by sizes that estimates can use."""

from dataclasses import dataclass

from graphtrain.config.schema import Model


@dataclass(frozen=True)
class Tower:
    """A vision tower as a native model: its sequences are images, its tokens patches."""

    model: Model  # its vocabulary has a row for each value of a patch, as the patch embedding has
    images: int  # of a sequence of the program
    tokens: int  # that the blocks compute for an image
    attended: float  # keys that a token attends to, on average over the blocks
    idle_layers: int  # blocks that are stored, but neither computed nor trained
    projection: tuple[tuple[int, int], ...]  # its matrices: rows (outputs) and columns
    features: int  # of an image, that the projection computes
    trained: tuple[str, ...] = ()  # arrays of `model` that an adapter trains in full, by path
    trained_projection: tuple[int, ...] = ()  # indices of its matrices that are trained in full
