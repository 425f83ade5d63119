"""The notebooks of the examples run in a real Jupyter kernel."""

import os
from pathlib import Path

import pytest
from unoptimized import XLA_FLAGS

ROOT = Path(__file__).parents[2]
pytest.importorskip("ipykernel", reason="needs ipykernel and nbclient, of the extra test-all")
nbclient, nbformat = map(pytest.importorskip, ("nbclient", "nbformat"))


def outputs(name: str, directory: Path) -> list[dict]:
    """Execute a notebook in a directory; return the results and prints of its cells."""
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS}
    environment.pop("GRAPHTRAIN_CACHE", None)
    resources = {"metadata": {"path": str(directory)}}
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    )
    client.execute(env=environment)
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "quickstart.ipynb",
            ["fits cpu:1", "<td>train</td>", "60 steps, 1 evaluations", "<pre>def"],
        ),
        ("fit_a_model.ipynb", ["does not fit h100:8", "fits h100:64"]),
    ],
)
def test_a_notebook_runs_and_shows_tables(name, shown, tmp_path):
    results = outputs(name, tmp_path)
    pages = "".join(one["data"].get("text/html", "") for one in results if "data" in one)
    assert [text for text in shown if text not in pages] == []
    assert "\x1b" not in "".join(one.get("text", "") for one in results)
