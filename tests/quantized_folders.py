"""Folders of Hugging Face in FP8 and MXFP4, as the authors of models publish them."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

BLOCK = 8
QUANTIZATION = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "mxfp4": {"quant_method": "mxfp4"},
}
RANDOM = np.random.default_rng(0)


def quantize(folder: Path, method: str) -> None:
    """Write a folder again as the authors of these models publish it."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if method == "fp8" and tensor.ndim == 2 and ".layers." in name and ".gate." not in name:
            rows, columns = (size // BLOCK for size in tensor.shape)
            blocks = tensor.float().reshape(rows, BLOCK, columns, BLOCK)
            scales = blocks.abs().amax((1, 3)) / 448
            values = blocks / scales[:, None, :, None]
            tensors[name] = values.reshape(tensor.shape).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
        elif method == "mxfp4" and name.endswith("_proj") and tensor.ndim == 3:
            experts, inputs, outputs = tensor.shape  # any bytes are weights
            shape = experts, outputs, inputs // 32
            tensors[f"{name}_blocks"] = torch.from_numpy(
                RANDOM.integers(0, 256, (*shape, 16), np.uint8)
            )
            tensors[f"{name}_scales"] = torch.from_numpy(RANDOM.integers(118, 124, shape, np.uint8))
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION[method]
    (folder / "config.json").write_text(json.dumps(config))


def quantize_deepseek_v4(folder: Path) -> None:
    """Write a folder again as DeepSeek-V4: matrices in FP8, experts in FP4, scales in e8m0."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        scale = f"{name.removesuffix('weight')}scale"
        is_matrix = tensor.ndim == 2 and name.endswith(".weight") and ".layers." in name
        if ".experts." in name:
            rows, columns = tensor.shape  # any bytes are weights
            pairs = RANDOM.integers(-128, 128, (rows, columns // 2), np.int8)
            powers = RANDOM.integers(118, 124, (rows, columns // 32), np.uint8)
            tensors[name] = torch.from_numpy(pairs)
            tensors[scale] = torch.from_numpy(powers).view(torch.float8_e8m0fnu)
        elif is_matrix and ".gate." not in name and not any(size % BLOCK for size in tensor.shape):
            rows, columns = (size // BLOCK for size in tensor.shape)
            blocks = tensor.float().reshape(rows, BLOCK, columns, BLOCK)
            scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448)))
            values = blocks / scales[:, None, :, None]
            tensors[name] = values.reshape(tensor.shape).to(torch.float8_e4m3fn)
            tensors[scale] = scales.to(torch.float8_e8m0fnu)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION["fp8"] | {"scale_fmt": "ue8m0"}
    (folder / "config.json").write_text(json.dumps(config | {"expert_dtype": "fp4"}))
