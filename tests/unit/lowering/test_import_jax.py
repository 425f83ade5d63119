"""The import of JAX without a search through all installed packages."""

import os
import subprocess
import sys

PROGRAM = """
from importlib import metadata
from unittest import mock
from lowering.machine import startup

find, read = metadata.distributions, metadata.PathDistribution.read_text
with mock.patch.object(metadata.PathDistribution, "read_text", autospec=True) as reader:
    reader.side_effect = read
    startup.import_jax()
from jax._src.numpy.array_constructors import rocm_plugin_extension

print(rocm_plugin_extension.__name__, reader.call_count, metadata.distributions is find)
"""


def test_the_plugin_of_rocm_is_found_without_reading_about_other_packages(tmp_path):
    described, module = tmp_path / "jax_rocm7_plugin-1.0.dist-info", tmp_path / "jax_rocm7_plugin"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-rocm7-plugin\n")
    module.mkdir()
    (module / "rocm_plugin_extension.py").touch()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["jax_rocm7_plugin.rocm_plugin_extension", "1", "True"]
