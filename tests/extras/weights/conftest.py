import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def megatron_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that megatron-core writes, and the scores that it computes."""
    pytest.importorskip("megatron.core")
    path = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).with_name("megatron_models.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return path
