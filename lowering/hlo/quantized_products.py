"""Products that a model asks for in fp8 or int8, and the dtype that the compiler gave each."""

from __future__ import annotations

import re

from lowering.hlo.text import Computation, Instruction, arrays

SCOPE = "quantized_product"  # of each such product in the name stack of a traced program
QUANTIZED = ("fp8", "int8")  # dtypes in which a product is as it was asked for

_PRODUCTS = ("dot", "convolution")  # XLA:TPU computes products as convolutions
_LIBRARIES = ("__cublas$", "__onednn$", "__triton_gemm")  # custom calls that are products
_INSIDE = re.compile(rf"([^/]*)/([^/]*)/{SCOPE}/")
_WRAPPED = re.compile(r"^(?:\w+\()*([^()]*)\)*$")  # "transpose(jvp(head))"


def quantized_product(computation: Computation, instruction: Instruction) -> dict[str, int]:
    """Return {"DTYPE PART/ARRAY DIRECTION": 1} for a product that was asked for in fp8 or int8.

    DTYPE is that of the operands which the compiled program multiplies: fp8 or int8, or a wider one
    if the compiler fell back. XLA merges products of one input, which are then one.
    """
    op_name = instruction.op_name
    match = _INSIDE.search(op_name)
    if match is None or not _is_product(instruction):
        return {}
    is_backward = "transpose(" in op_name and "rematted_computation" not in op_name
    dtypes = [arrays(shape)[0][0] for shape in computation.operand_shapes(instruction)[:2]]
    direction = "backward" if is_backward else "forward"
    part, name = (_WRAPPED.sub(r"\1", scope) for scope in match.groups())
    array = name if part == name else f"{part}/{name}"  # the head is a part and an array
    return {f"{_common(dtypes)} {array} {direction}": 1}


def _is_product(instruction: Instruction) -> bool:
    target = (instruction.attribute("custom_call_target") or "").strip('"')
    return instruction.opcode in _PRODUCTS or target.startswith(_LIBRARIES)


def _common(dtypes: list[str]) -> str:
    """Return fp8 or int8 if both operands are that, else the dtype of the first wider one."""
    names = ["fp8" if one.startswith("f8") else "int8" if one == "s8" else one for one in dtypes]
    return next((name for name in names if name not in QUANTIZED), names[0])
