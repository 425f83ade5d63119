"""Conversion between arrays of NumPy and tensors of PyTorch, in the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_numpy(tensor: Any, dtype: np.dtype) -> np.ndarray:
    """Convert a PyTorch tensor to NumPy; shares its memory if the tensor is contiguous."""
    import torch

    tensor = tensor.detach().contiguous()
    bits = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor
    return bits.numpy().view(dtype)


def as_torch(array: np.ndarray) -> Any:
    """Return a PyTorch tensor with the memory of an array, whose dtype may be bfloat16."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
