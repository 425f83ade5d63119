"""Eight CPU devices for every test, shapes checked when models are called, options of the tests."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

import pytest
import shapes
from hypothesis import settings

shapes.install()

from lowering.machine.target import Target  # noqa: E402
from lowering.xla import backend as xla  # noqa: E402

pytest_plugins = ["out_of_time", "skips", "small_datasets"]

xla.devices(Target.parse("cpu:8"))  # starts the backend, so that no test takes another number

settings.register_profile("untimed", deadline=None)  # a busy machine is no defect
settings.load_profile("untimed")

# A shell starts what it runs in the background with SIGINT ignored, and commands keep that; tests
# that send them SIGINT would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" not in os.environ:
    # The secret that authenticates cache entries: of the tests, not of the user; one for all
    # workers, which share caches.
    os.environ["XDG_CONFIG_HOME"] = _config = tempfile.mkdtemp(prefix="graphtrain-tests-config-")
    atexit.register(shutil.rmtree, _config, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not among what was imported: a tenth of a test's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
