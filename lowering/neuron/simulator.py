"""Simulator of neuronx-cc's command line: python -m lowering.neuron.simulator compile ...

Reads a module as the compiler would, rejects what the compiler would reject, with the same codes,
and writes a file that only the target neuron-sim can run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lowering.errors import LoweringError
from lowering.hlo.proto import read_module
from lowering.machine.target import Target
from lowering.neuron import neff
from lowering.neuron.preflight import preflight

_REJECTED_STATUS = 70  # exit status of neuronx-cc for a rejected program


def main(words: Sequence[str] | None = None) -> int:
    """Compile one file; return the exit status."""
    args = _parser().parse_args(words)
    try:
        hlo = args.program.read_bytes()
        read_module(hlo)
    except (OSError, LoweringError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    rejections = _rejections(hlo, args)
    for rejection in rejections:
        print(f"ERROR: {rejection}", file=sys.stderr)
    if rejections:
        return _REJECTED_STATUS
    args.output.write_bytes(_compile(hlo, args))
    print("Compiler status PASS")
    return 0


def _rejections(hlo: bytes, args: argparse.Namespace) -> list[str]:
    """Return the errors that the compiler would report for a module."""
    target = Target.parse("trn1" if args.target in ("trn1n", "inf2") else args.target)
    limit = args.internal_max_instruction_limit
    flags = [f"--internal-max-instruction-limit={limit}"] if limit else []
    return [
        str(finding) for finding in preflight(hlo, target, flags) if finding.severity == "error"
    ]


def _compile(hlo: bytes, args: argparse.Namespace) -> bytes:
    from lowering.neuron.simulation import compile_module
    from lowering.xla import backend as xla
    from lowering.xla.cpu_collective_order import serialize_executable_order

    ranks = args.simulated_ranks
    devices = xla.devices(Target("cpu", (ranks,)))
    # LLVM's optimisations take most of the compile time.
    xla_options = {"xla_backend_optimization_level": 1} if args.optlevel == 1 else {}
    executable = compile_module(hlo, devices, xla_options)
    memory = executable.get_compiled_memory_stats()
    header = {
        "version": neff.SIMULATOR_VERSION,
        "target": args.target,
        "ranks": ranks,
        "temporaries": memory.temp_size_in_bytes,
    }
    return neff.pack(header, serialize_executable_order(executable.serialize()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="neuronx-cc (simulator)", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=neff.SIMULATOR_VERSION)
    compile = parser.add_subparsers(required=True).add_parser("compile", allow_abbrev=False)
    compile.add_argument("program", type=Path)
    compile.add_argument("--framework", choices=["XLA"], required=True)
    compile.add_argument(
        "--target", choices=["trn1", "trn1n", "inf2", "trn2", "trn3"], required=True
    )
    compile.add_argument("--output", type=Path, default=Path("file.neff"))
    compile.add_argument("--model-type", choices=["generic", "transformer", "unet-inference"])
    compile.add_argument("--auto-cast", choices=["none", "matmult", "all"])
    compile.add_argument("--optlevel", "-O", type=int, choices=[1, 2, 3], default=2)
    compile.add_argument("--logical-nc-config", "-lnc", type=int, choices=[1, 2])
    compile.add_argument("--enable-mixed-precision-accumulation", action="store_true")
    compile.add_argument("--native-int64", choices=["default", "enabled", "disabled"])
    compile.add_argument("--implicit-integer-downcast")
    compile.add_argument("--internal-max-instruction-limit", type=int)
    compile.add_argument("--verbose")
    compile.add_argument("--simulated-ranks", type=int, default=1)  # not an option of neuronx-cc
    return parser


if __name__ == "__main__":
    sys.exit(main())
