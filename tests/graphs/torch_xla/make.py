"""Makes the graphs of this folder: python make.py, with the interpreter of torch-xla 2.9.0.

Each folder is what graphtrain/torch_xla/recorder.py leaves of examples/torch-xla/train.py, its HLO
compressed. one/ also has the inputs of its first step, and the loss that torch-xla computes.
"""

import gc
import gzip
import os
import runpy
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RECORDER, SCRIPT = ROOT / "graphtrain/torch_xla/recorder.py", "examples/torch-xla/train.py"
SMALL = ["--width", "8", "--report-every", "0"]


def record(name: str, devices: int, steps: int, *words: str) -> None:
    """Extract into a folder."""
    folder = HERE / name
    subprocess.run(
        [sys.executable, RECORDER, "--steps", str(steps), folder, SCRIPT, *SMALL, *words],
        check=True,
        cwd=ROOT,
        env=os.environ | {"CPU_NUM_DEVICES": str(devices)},
    )
    (folder / "stack.txt").unlink()
    for file in folder.glob("*.hlo.pb"):
        file.with_suffix(".pb.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
        file.unlink()


def run() -> None:
    """Train one step for real, and keep what it was given and the loss."""
    os.environ["PJRT_DEVICE"] = "CPU"
    import numpy as np
    import torch
    import torch_xla

    functions = torch_xla._XLAC
    step_marker = functions._xla_step_marker

    def mark(*arguments: object, **named: object) -> None:
        tensors = {
            functions._xla_get_tensor_id(each): each
            for each in gc.get_objects()
            if issubclass(type(each), torch.Tensor) and each.device.type == "xla"
        }
        pending = [
            each
            for _, each in sorted(tensors.items())
            if functions._check_tensor_need_materialization([each])[0]
        ]
        _, given = functions._get_tensors_xla_device_data_node(pending)
        inputs = {f"input{i:02}": each.cpu().numpy() for i, each in enumerate(given)}
        step_marker(*arguments, **named)
        (loss,) = (each.item() for each in pending if each.shape == () and each.requires_grad)
        np.savez_compressed(HERE / "one" / "first_step.npz", loss=loss, **inputs)

    functions._xla_step_marker = mark
    sys.argv = [SCRIPT, "--steps", "1", *SMALL]
    os.chdir(ROOT)
    runpy.run_path(SCRIPT, run_name="__main__")


if __name__ == "__main__":
    record("one", 1, 2)
    record("eight", 8, 2, "--mesh", "2", "4")
    run()
