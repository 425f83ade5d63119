"""Counts of what the training steps of the standard configurations are made of; nothing is timed.

StableHLO, which no compiler has seen yet, is the same on every machine. An optimized program is
counted where its compiler describes the machine itself (GPU), not where it asks the processor.
"""

import importlib.util
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from graphtrain.compile import worker
from graphtrain.config import load_config
from graphtrain.config.resolve import resolve
from lowering.hlo.text import arrays, item_bits, parse
from lowering.lowered import Lowered
from lowering.machine.target import Target
from lowering.xla import backend as xla

ROOT = Path(__file__).parents[2]
Counts = Mapping[str, int | str]


class Config(NamedTuple):
    """An example's training step for a target; also compiled, if no device decides its code."""

    example: str
    target: str
    optimized: bool = False
    needs: str = ""  # what else must be installed

    def __str__(self) -> str:
        return f"{self.example} {self.target}"

    @property
    def file(self) -> Path:
        """The expected counts; they differ by minor version of JAX."""
        version = ".".join(metadata.version("jax").split(".")[:2])
        name = f"{self.example}-{self.target.replace(':', '-')}.toml"
        return Path(__file__).parent / version / name

    @property
    def missing(self) -> str:
        """What would have to be installed."""
        compiler = {"cuda": "jax_plugins"}.get(Target.parse(self.target).platform, "")
        wanted = filter(None, (self.needs, compiler))
        return ", ".join(name for name in wanted if not importlib.util.find_spec(name))


CONFIGS = (
    Config("quickstart", "cpu:1"),
    Config("quickstart", "cpu:8"),
    Config("lora", "cpu:8"),
    Config("hf-llama", "cpu:8", needs="torchax"),
    Config("llama2-7b", "h100:64", optimized=True),
)

# Operations that cost something or show that something went another way.
_STABLEHLO = (
    "transpose", "convert", "gather", "scatter", "dynamic_slice", "dynamic_update_slice", "while",
    "custom_call", "optimization_barrier", "sharding_constraint", "concatenate", "reduce", "sort",
)  # fmt: skip
_OPTIMIZED = ("fusion", "transpose", "copy", "convert", "while", "scatter", "gather", "reduce")
_OPERATION = re.compile(r'^ *%\S+ = "?(?:stablehlo|sdy|chlo|func)?\.?(\w+)', re.MULTILINE)
_DOT = re.compile(r"stablehlo\.dot_general.* : \((.*)\) -> (.*)$", re.MULTILINE)
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")
_PRODUCTS = ("__cublas", "__cudnn", "__triton")  # custom calls that are matrix products


def count(config: Config) -> dict[str, Counts]:
    """By form of the program: what it is made of."""
    path = ROOT / f"examples/{config.example}.toml"
    lowered = worker.lower(resolve(load_config(path, [], config.target).program), "train")
    counted = {"arrays": _of_plan(lowered), "stablehlo": of_stablehlo(lowered.text)}
    if config.optimized:
        counted["optimized"] = _of_optimized(lowered)
    return counted


def _of_plan(lowered: Lowered) -> Counts:
    roles = ("parameter", "frozen", "optimizer")
    return {f"bytes of {role} arrays": lowered.plan.bytes_per_device(role) for role in roles}


def of_stablehlo(text: str) -> Counts:
    """Of a program's text, loops' bodies once."""
    operations = Counter(_OPERATION.findall(text))
    dots = Counter(_dtypes(*found.groups()) for found in _DOT.finditer(text))
    largest = max(_TENSOR.findall(text), key=_tensor_bytes)
    return {
        "instructions": operations.total(),
        **{f"dot {dtypes}": number for dtypes, number in sorted(dots.items())},
        **{name: operations[name] for name in _STABLEHLO},
        "largest array": "".join(largest),
        "bytes of the largest array": _tensor_bytes(largest),
    }


def _dtypes(operands: str, result: str) -> str:
    names = [dtype for _, dtype in _TENSOR.findall(operands)]
    return f"{' x '.join(names)} to {_TENSOR.findall(result)[0][1]}"


def _tensor_bytes(tensor: tuple[str, str]) -> int:
    sizes, dtype = tensor
    bits = item_bits(dtype.replace("i1", "pred").lstrip("u").replace("i", "s"))
    return math.prod(int(size) for size in sizes.split("x") if size) * bits // 8


def _of_optimized(lowered: Lowered) -> Counts:
    """Of one device's program, as its record tells and as its text has it."""
    text = lowered.handle.compile(compiler_options=lowered.options).as_text()
    reading = xla.read(text, lowered.plan.mesh)
    counted: Counter[str] = Counter()
    for computation in parse(text).computations.values():
        for each in computation.instructions.values():
            counted["instructions"] += 1
            target = each.attribute("custom_call_target") or ""
            if each.opcode == "dot" or target.strip('"').startswith(_PRODUCTS):
                shapes = computation.operand_shapes(each)[:2]
                names = " x ".join(arrays(shape)[0][0] for shape in shapes)
                counted[f"dot {names} to {arrays(each.shape)[0][0]}"] += 1
            elif each.opcode in _OPTIMIZED:
                counted[each.opcode] += 1
    for each in reading.collectives:
        name = f"{each.op} over {' x '.join(each.axes)}"
        counted[f"{name}, in a step"] += each.count
        counted[f"{name}, bytes sent in a step"] += round(each.wire_bytes_per_step)
    return dict(sorted(counted.items()))


def render(counted: Mapping[str, Counts]) -> str:
    """As TOML."""
    blocks = []
    for form, counts in counted.items():
        lines = [f'"{name}" = {_value(value)}' for name, value in counts.items()]
        blocks.append("\n".join([f"[{form}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _value(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:_}"


def difference(config: Config, counted: Mapping[str, Counts]) -> str:
    """A table of the counts that are not as the file has them; empty if all are."""
    golden = tomllib.loads(config.file.read_text())
    rows = [
        (f"{form}: {name}", golden.get(form, {}).get(name), counted.get(form, {}).get(name))
        for form in golden | counted
        for name in golden.get(form, {}) | counted.get(form, {})
    ]
    changed = [(name, was, now) for name, was, now in rows if was != now]
    width = max((len(name) for name, _, _ in changed), default=0)
    return "\n".join(
        f"{name:<{width}}  {_shown(was)} -> {_shown(now)}" for name, was, now in changed
    )


def _shown(value: int | str | None) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else value
