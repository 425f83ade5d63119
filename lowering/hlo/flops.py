"""FLOPs of one HLO instruction: matrix products in all forms that the backends emit.

A multiply-add counts as two operations. Everything else (norms, softmax, the optimizer) is left
out, as it is in a machine's peak rate.
"""

from __future__ import annotations

import functools
import math
import re

from lowering.hlo.text import Computation, Instruction, arrays

_DIMENSIONS = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_GEMM = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_COST = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]')
# Scope in op_name that states the FLOPs of a kernel (models/grouped_matmul.py).
_ANNOTATED = re.compile(r'op_name="[^"]*kernel_flops_(\d+)')
# JAX's attention kernels: number of matrix products, and the query dimension that is the sequence.
# Each pass of a backward recomputes the scores.
_KERNELS = {
    "mha_forward": (2, 1),
    "mha_backward": (7, 1),
    "splash_mha_fwd": (2, 2),
    "splash_mha_dq": (3, 2),
    "splash_mha_dkv": (4, 2),
}
# On TPU the instruction is named after its kernel; on GPU the kernel's name is in op_name.
_KERNEL = re.compile(rf'(?:^|op_name="[^"]*/)({"|".join(_KERNELS)})[a-z_]*(?:\.|/pallas_call")')
_STEPS = {"stride": "1", "pad": "0", "lhs_dilate": "1", "rhs_dilate": "1"}
_INTEGER = re.compile(r"\d+")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


def instruction_flops(computation: Computation, instruction: Instruction) -> float:
    """Return the FLOPs of one execution.

    0 for an instruction that is not a matrix product and for a kernel of unknown cost.
    """
    if instruction.opcode == "dot":
        return _dot(computation, instruction, _DIMENSIONS)
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode.removesuffix("-start") == "custom-call":
        return _custom_call(computation, instruction)
    return 0.0


def _custom_call(computation: Computation, instruction: Instruction) -> float:
    if cost := _COST.search(instruction.rest):  # cost estimate in the source of a Pallas kernel
        return float(cost[1])
    if annotated := _ANNOTATED.search(instruction.rest):
        return float(annotated[1])
    if kernel := _KERNEL.search(f"{instruction.name}. {instruction.rest}"):
        return _kernel(computation, instruction, *_KERNELS[kernel[1]])
    target = instruction.attribute("custom_call_target") or ""
    if "__cublas" in target:
        return _dot(computation, instruction, _GEMM)
    if "fmha" in target:
        return _attention(computation, instruction)
    return 0.0


def _dot(computation: Computation, instruction: Instruction, pattern: re.Pattern[str]) -> float:
    contracting = pattern.search(instruction.rest)
    shapes = computation.operand_shapes(instruction)
    if contracting is None or not shapes:
        return 0.0
    _, lhs = arrays(shapes[0])[0]
    _, result = arrays(instruction.shape)[0]
    summed = (lhs[int(dimension)] for dimension in _INTEGER.findall(contracting[1]))
    return 2.0 * math.prod(result) * math.prod(summed)


def _kernel(
    computation: Computation, instruction: Instruction, products: int, positions: int
) -> float:
    """Return the FLOPs of block-wise attention without a mask, although it skips masked blocks."""
    sizes = (arrays(shape)[0][1] for shape in computation.operand_shapes(instruction))
    query = next((size for size in sizes if len(size) == 4), None)
    return 0.0 if query is None else 2.0 * products * math.prod(query) * query[positions]


def _attention(computation: Computation, instruction: Instruction) -> float:
    """Return the FLOPs of cuDNN attention without a mask.

    Forward: the scores and their product with the values. Backward: the recomputed scores and four
    gradients.
    """
    scores, shapes = _SCORES.search(instruction.rest), computation.operand_shapes(instruction)
    if scores is None or not shapes:
        return 0.0
    head_dim = arrays(shapes[0])[0][1][-1]
    products = 5 if "Backward" in (instruction.attribute("custom_call_target") or "") else 2
    return 2.0 * products * head_dim * math.prod(int(size) for size in _INTEGER.findall(scores[1]))


def _convolution(computation: Computation, instruction: Instruction) -> float:
    """Return the FLOPs of a convolution, without taps that fall on padding.

    On TPU matrix products with weights are convolutions in which most taps fall on padding.
    """
    labels, shapes = _LABELS.search(instruction.rest), computation.operand_shapes(instruction)
    if labels is None or len(shapes) < 2:
        return 0.0
    lhs = dict(zip(labels[1], arrays(shapes[0])[0][1], strict=True))
    kernel = dict(zip(labels[2], arrays(shapes[1])[0][1], strict=True))
    result = dict(zip(labels[3], arrays(instruction.shape)[0][1], strict=True))
    window = _window(instruction.rest)
    taps = math.prod(
        _taps(lhs[label], size, result[label], *(window[name][int(label)] for name in _STEPS))
        for label, size in kernel.items()
        if label.isdigit()
    )
    return 2.0 * result["b"] * result["f"] * kernel["i"] * taps


def _window(attributes: str) -> dict[str, list[int]]:
    """Return stride, low padding and dilations for each spatial dimension."""
    match = _WINDOW.search(attributes)
    fields = dict(field.split("=") for field in match[1].split()) if match else {}
    dimensions = fields.get("size", "").count("x") + 1
    written = {name: fields[name].split("x") for name in _STEPS if name in fields}
    return {
        name: [int(value.partition("_")[0]) for value in written.get(name, [default] * dimensions)]
        for name, default in _STEPS.items()
    }


@functools.lru_cache(maxsize=4096)
def _taps(
    lhs: int, kernel: int, result: int, stride: int, pad: int, lhs_step: int, kernel_step: int
) -> int:
    """Count pairs (output position, kernel position) that read an element, not padding or a hole.

    A hole is a position that base dilation inserts.
    """
    starts = range(0, result * stride, stride)
    last = (lhs - 1) * lhs_step
    return sum(
        0 <= position <= last and position % lhs_step == 0
        for tap in range(kernel)
        for position in (start + tap * kernel_step - pad for start in starts)
    )
