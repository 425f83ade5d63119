"""What a run imports; in a fresh process, as others have imported everything in this one."""

import importlib
import subprocess
import sys

from lowering.machine.startup import import_without

PROGRAM = """
import sys
from pathlib import Path
from graphtrain.data.batches.sample_streams import import_grain
from graphtrain.run.metrics import Journal
journal = Journal(Path(sys.argv[1]), after=0, tensorboard=True)
journal.write({"step": 1, "loss": 0.5})
import_grain().MapDataset
journal.close()
print({"torch", "orbax.checkpoint"} & set(sys.modules))
"""


def test_reading_data_and_writing_metrics_take_neither_orbax_nor_pytorch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_what_was_left_out_can_be_imported_afterwards(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "heavy_library.py").touch()
    (tmp_path / "light_library.py").write_text(
        "try:\n    import heavy_library\nexcept ImportError:\n    heavy_library = None\n"
    )
    assert import_without("light_library", "heavy_library").heavy_library is None
    assert importlib.import_module("heavy_library")
