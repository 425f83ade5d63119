"""Weights in FP8 and MXFP4 are read as the values of their bytes, or refused by name."""

import itertools
import json
import struct

import ml_dtypes
import numpy as np
import pytest

from graphtrain.config.hf_quantization import read_quantization
from graphtrain.errors import WeightsError
from graphtrain.weights.quantized_files import open_hugging_face

RANDOM = np.random.default_rng(0)
CODES = {"float32": "F32", "uint8": "U8", "bfloat16": "BF16"}
FP8 = {"quant_method": "fp8", "weight_block_size": [4, 8], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4"}


def folder(path, tensors, quantization, **config):
    """Write a folder; a tensor is an array, or its bytes and the code of its dtype."""
    header, content = {}, b""
    for name, tensor in tensors.items():
        array, code = tensor if isinstance(tensor, tuple) else (tensor, CODES[tensor.dtype.name])
        offsets = [len(content), len(content) + array.nbytes]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": offsets}
        content += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": quantization} | config)
    )
    return open_hugging_face(path)


def e4m3(code: int) -> float:
    """Section 5.2 of the MX specification: bias 7, no infinity."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if code & 128 else size


def e2m1(code: int) -> float:
    """Section 5.3.3: bias 1, neither infinity nor NaN."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if code & 8 else size


E4M3, E2M1 = (np.array([one(code) for code in range(n)]) for one, n in ((e4m3, 256), (e2m1, 16)))


def fp8_codes(shape):
    codes = RANDOM.integers(0, 256, shape, np.uint8)
    return np.where(codes & 127 == 127, 0, codes).astype(np.uint8)


def every_part(files, name, whole):
    """Compare parts of each axis with the complete array, as bits."""
    bits = f"u{whole.itemsize}"
    np.testing.assert_array_equal(files.read(name).view(bits), whole.view(bits))
    for axis, size in enumerate(whole.shape):
        for begin, end in itertools.combinations(range(0, size + 1, max(1, size // 7)), 2):
            index = [slice(None)] * whole.ndim
            index[axis] = slice(begin, end)
            part = files.part(name, tuple(index))
            np.testing.assert_array_equal(part.view(bits), whole[tuple(index)].view(bits))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_of_fp8_are_read_in_any_part_and_may_be_incomplete(tmp_path, dtype):
    codes, scales = fp8_codes((2, 11, 21)), RANDOM.random((2, 3, 3), np.float32) + 0.01
    files = folder(
        tmp_path, {"a.weight": (codes, "F8_E4M3"), "a.weight_scale_inv": scales}, FP8, dtype=dtype
    )
    assert (files.names, files.shape("a.weight")) == (("a.weight",), (2, 11, 21))
    values = E4M3[codes]
    large = np.repeat(np.repeat(scales, 4, 1), 8, 2)[:, :11, :21].astype(np.float64)
    exact = (values * large).astype(np.float32)  # a product in float32 rounds the exact one
    assert files.dtype("a.weight") == dtype
    every_part(files, "a.weight", exact.astype(files.dtype("a.weight")))


def test_large_matrices_are_dequantized_in_several_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("graphtrain.weights.quantized_weights._CHUNK", 50)
    codes, scales = fp8_codes((11, 21)), RANDOM.random((3, 3), np.float32)
    files = folder(tmp_path, {"w": (codes, "F8_E4M3"), "w_scale_inv": scales}, FP8, dtype="float32")
    large = np.repeat(np.repeat(scales, 4, 0), 8, 1)[:11, :21]
    every_part(files, "w", E4M3[codes].astype(np.float32) * large)
    blocks, powers = RANDOM.integers(0, 256, (3, 5, 2, 16), np.uint8), np.full((3, 5, 2), 120, "u1")
    files = folder(tmp_path, {"w_blocks": blocks, "w_scales": powers}, MXFP4)
    every_part(files, "w", mx_values(blocks, powers).astype(ml_dtypes.bfloat16))


SCALES = {
    "a tensor": (FP8 | {"weight_block_size": None}, "_scale_inv", np.float32(0.3).reshape(())),
    "a tensor, as an array": (FP8 | {"weight_block_size": None}, "_scale_inv", np.ones(1, "f4")),
    "rows": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
            },
        },
        "_scale",
        (RANDOM.random((6, 1), np.float32) + 0.1).astype(ml_dtypes.bfloat16),
    ),
    "exponents": (
        FP8 | {"weight_block_size": [6, 8], "scale_fmt": "ue8m0"},
        "_scale_inv",
        np.array([[120], [121]], np.uint8).reshape(1, 2),
    ),
}


@pytest.mark.parametrize("kind", SCALES)
def test_scales_may_be_of_a_tensor_or_a_row_and_powers_of_two(tmp_path, kind):
    quantization, suffix, scales = SCALES[kind]
    codes = fp8_codes((6, 16))
    tensors = {"w.weight": (codes, "F8_E4M3"), f"w.weight{suffix}": scales}
    files = folder(tmp_path, tensors | {"w.input_scale": np.ones(1, "f4")}, quantization)
    assert files.names == ("w.weight",)  # engines quantize activations, training does not
    if kind == "exponents":
        scales = np.repeat(2.0 ** (scales.astype(int) - 127), 8, axis=1)
    expected = E4M3[codes] * np.broadcast_to(scales.astype(np.float64), (6, 16))
    every_part(files, "w.weight", expected.astype(np.float32).astype(ml_dtypes.bfloat16))


def mx_values(blocks, powers):
    """(experts, in, out) in float64."""
    pairs = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], -1)
    values = pairs.reshape(*powers.shape, 32) * 2.0 ** (powers[..., None].astype(int) - 127)
    return values.reshape(*powers.shape[:2], -1).transpose(0, 2, 1)


def test_mxfp4_is_exact_with_all_codes_and_exponents_and_transposed(tmp_path):
    blocks = RANDOM.integers(0, 256, (3, 28, 3, 16), np.uint8)
    powers = np.arange(3 * 28 * 3, dtype=np.uint8).reshape(3, 28, 3)  # 0 to 251
    files = folder(tmp_path, {"w_blocks": blocks, "w_scales": powers}, MXFP4)
    assert (files.names, files.shape("w")) == (("w",), (3, 96, 28))
    every_part(files, "w", mx_values(blocks, powers).astype(ml_dtypes.bfloat16))


W, S = (fp8_codes((8, 8)) | 1 & 126, "F8_E4M3"), np.ones((2, 1), np.float32)
B, P = RANDOM.integers(0, 256, (2, 4, 1, 16), np.uint8), np.full((2, 4, 1), 127, np.uint8)


def changed(array, value):
    array = array.copy()
    array.flat[-1] = value
    return array


DAMAGE = {
    "a.w has NaN": (FP8, (changed(W[0], 0x7F), "F8_E4M3"), S, "a.w contains .*0x7f"),
    "a.w has -NaN": (FP8, (changed(W[0], 0xFF), "F8_E4M3"), S, "a.w contains .*0xff"),
    "scale NaN": (FP8, W, changed(S, np.nan), "a.w contains a scale that is NaN"),
    "scale infinite": (FP8, W, changed(S, np.inf), "a.w contains a scale that is .*infinite"),
    "scale negative": (FP8, W, changed(S, -1), "a.w contains a scale that .*negative"),
    "scale zero": (FP8, W, changed(S, 0), "a.w contains a scale of zero"),
    "too large": (FP8, W, changed(S, 3e38), "a.w contains a value that is too large for bfloat16"),
    "no scale": (FP8, W, None, "a.w is in FP8 and the folder has no a.w_scale_inv"),
    "scale shape": (FP8, W, S.T, r"a.w_scale_inv has shape \(1, 2\), which does not match a.w"),
    "scale dtype": (FP8, W, np.ones((2, 1), np.uint8), "a.w_scale_inv has dtype U8"),
    "vector": (FP8, (W[0][0], "F8_E4M3"), S, "a.w of shape .* only matrices"),
    "e8m0 NaN": (MXFP4, B, changed(P, 255), "a.w contains an e8m0 scale of 255"),
    "mx too large": (MXFP4, B | 0x77, changed(P, 254), "a.w contains a value that is too large"),
    "no mx scale": (MXFP4, B, None, "a.w_blocks is in MXFP4 and the folder has no a.w_scales"),
    "mx scale shape": (MXFP4, B, P[:, :3], r"a.w_scales has shape \(2, 3, 1\) instead of"),
    "mx block": (MXFP4, B[..., :8], P, r"a.w_blocks has shape \(2, 4, 1, 8\) instead of"),
    "mx dtype": (MXFP4, B, P.astype(np.float32), "a.w_blocks and a.w_scales have the dtypes"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_with_the_name_of_the_tensor(tmp_path, kind):
    quantization, values, scales, message = DAMAGE[kind]
    names = ("a.w", "a.w_scale_inv") if quantization is FP8 else ("a.w_blocks", "a.w_scales")
    tensors = {names[0]: values} | ({} if scales is None else {names[1]: scales})
    with pytest.raises(WeightsError, match=message):
        folder(tmp_path, tensors, quantization).read("a.w")


def test_a_scale_of_zero_for_zeros_is_no_damage(tmp_path):
    tensors = {"w": (np.zeros((8, 8), np.uint8), "F8_E4M3"), "w_scale_inv": S * 0}
    assert not folder(tmp_path, tensors, FP8).read("w").any()


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
REFUSED = {
    "gptq": ({"quant_method": "gptq"}, "quant_method = 'gptq' is not supported"),
    "awq": ({"quant_method": "awq"}, "'awq' .* save it with save_pretrained"),
    "nothing": ({}, "quant_method = None"),
    "a list": ([], "quantization_config is not an object"),
    "int4 experts": (FP8 | {"expert_dtype": "int4"}, "expert_dtype = 'int4'"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
    "blocks": (FP8 | {"weight_block_size": [0, 8]}, r"weight_block_size = \[0, 8\] is not a pair"),
    "packed": (COMPRESSED | {"format": "pack-quantized"}, "format = 'pack-quantized'"),
    "rotated": (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "rotated"),
    "sparse": (COMPRESSED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is not"),
    "no groups": (COMPRESSED, "config_groups is not supported"),
    "integers": (
        COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
        "weights of .*'int'",
    ),
}


# As llm-compressor writes it beside weights that are not sparse.
DENSE = {
    "format": "dense", "global_sparsity": 0.13, "ignore": [],
    "registry_requires_subclass": False, "sparsity_structure": "unstructured", "targets": [],
}  # fmt: skip


def test_a_measured_sparsity_of_dense_weights_is_not_refused():
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    config = COMPRESSED | {"config_groups": {"group_0": {"weights": weights}}}
    beside = {"sparsity_config": DENSE, "transform_config": {"config_groups": {}}}
    plain = read_quantization({"quantization_config": config})
    assert plain is not None
    assert read_quantization({"quantization_config": config | beside}) == plain


UNDECLARED = {
    "no fp8": (None, {"w": W}, r"model.safetensors: w is stored in FP8 .*no quantization_config"),
    "no mxfp4": (None, {"a.w_blocks": B, "a.w_scales": P}, "a.w_blocks is stored in MXFP4"),
    "mxfp4 as fp8": (FP8, {"a.w_blocks": B, "a.w_scales": P}, "MXFP4 .* quant_method = 'fp8'"),
    "fp8 as mxfp4": (MXFP4, {"w": W}, "w is stored in FP8 .* quant_method = 'mxfp4'"),
    "gptq": (None, {"a.qweight": (np.ones(2, np.int32), "I32")}, "a.qweight is stored in GPTQ"),
    "bytes": (FP8, {"a.weight": P}, "a.weight is stored in bytes"),
    "e5m2": (FP8, {"w": (W[0], "F8_E5M2")}, "w is in FP8 as e5m2; only e4m3 is read"),
    "only scales": (MXFP4, {"a.w_scales": P}, "a.w_scales is of MXFP4 and a.w_blocks is missing"),
    "both": (MXFP4, {"a.w_blocks": B, "a.w_scales": P, "a.w": S}, "two sources of one array"),
    "two scales": (
        FP8,
        {"a.weight": W, "a.weight_scale_inv": S, "a.scale": S},
        "a.weight is in FP8 and has the scales a.weight_scale_inv and a.scale",
    ),
}


@pytest.mark.parametrize("kind", UNDECLARED)
def test_tensors_that_contradict_the_configuration_are_refused_by_name(tmp_path, kind):
    quantization, tensors, message = UNDECLARED[kind]
    with pytest.raises(WeightsError, match=message):
        folder(tmp_path, tensors, quantization)


@pytest.mark.parametrize("beside", [{"expert_dtype": "fp4"}, {}])
def test_experts_in_fp4_with_the_scales_of_deepseek_v4(tmp_path, beside):
    """The dtype of experts may be beside quantization_config, or in it."""
    pairs = RANDOM.integers(0, 256, (6, 32), np.uint8)
    powers = RANDOM.integers(118, 130, (6, 2), np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(6, 64)
    expected = E2M1[codes] * np.repeat(2.0 ** (powers.astype(int) - 127), 32, 1)
    tensors = {"e.w1.weight": (pairs.view(np.int8), "I8"), "e.w1.scale": (powers, "F8_E8M0")}
    quantization = FP8 | ({} if beside else {"expert_dtype": "fp4"})
    files = folder(tmp_path, tensors, quantization, dtype="float32", **beside)
    assert files.names == ("e.w1.weight",)
    every_part(files, "e.w1.weight", expected.astype(np.float32))
    with pytest.raises(WeightsError, match=r"e\.w1\.weight is stored in bytes"):
        folder(tmp_path, tensors, FP8)
    with pytest.raises(WeightsError, match=r"w1.scale has shape .* with blocks of \(1, 32\)"):
        folder(tmp_path, tensors | {"e.w1.scale": (powers[:3], "F8_E8M0")}, FP8, expert_dtype="fp4")


@pytest.mark.parametrize("kind", REFUSED)
def test_other_quantizations_are_refused_by_name(tmp_path, kind):
    quantization, message = REFUSED[kind]
    with pytest.raises(WeightsError, match=message):
        folder(tmp_path, {"w": np.ones(3, np.float32)}, quantization)
