"""What an extraction says of its meshes and steps."""

import json
from pathlib import Path

import pytest

from graphtrain.cli.extract_report import ranges
from graphtrain.errors import ExtractionError
from graphtrain.torch_xla.graphs import read_extraction


def extraction(path: Path, **about: object) -> Path:
    told = {
        "format": 1, "script": "train.py", "versions": {}, "devices": 8, "meshes": [], "steps": 1,
        "warnings": [], "error": None, "graphs": [],
    }  # fmt: skip
    (path / "graphs.json").write_text(json.dumps(told | about))
    return path


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"data": 2, "model": 4}, {"data": 2, "tensor": 4}),
        ({"fsdp": 2, "tensor": 4}, {"fsdp": 2, "tensor": 4}),
        ({"tensor": 2, "fsdp": 4}, {"data": 2, "tensor": 4}),
        ({"x": 8}, {"data": 8}),
        ({"a": 2, "b": 2, "c": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_axes_of_a_script_get_our_names_in_their_order(tmp_path: Path, theirs: dict, ours: dict):
    mesh = {"axes": theirs, "devices": list(range(8))}
    found = read_extraction(extraction(tmp_path, meshes=[mesh]))
    assert list(found.meshes[0].axes.items()) == list(ours.items())


def test_devices_out_of_order_are_refused(tmp_path: Path):
    mesh = {"axes": {"x": 2}, "devices": [1, 0]}
    with pytest.raises(ExtractionError, match=r"devices in the order \[1, 0\]"):
        read_extraction(extraction(tmp_path, devices=2, meshes=[mesh]))


def test_another_format_is_refused(tmp_path: Path):
    with pytest.raises(ExtractionError, match="another version"):
        read_extraction(extraction(tmp_path, format=2))


def test_steps_are_told_as_ranges():
    assert ranges([0, 2, 3, 4, 7, 7]) == "0, 2-4, 7"
