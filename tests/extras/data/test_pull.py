"""Folders of an object store are downloaded completely, or not at all."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from graphtrain.cache.remote import ObjectStore
from graphtrain.cli.data import command
from graphtrain.errors import GraphtrainError

pytest.importorskip("obstore")


@pytest.fixture
def dataset(make_dataset) -> Path:
    return Path(make_dataset([[1, 2, 3], [4, 5]] * 50, 6))


def pull(*words):
    result = CliRunner().invoke(command, ["pull", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, GraphtrainError):
        raise result.exception
    return result.output, result.exception


def test_a_dataset_is_downloaded_and_verified_while_half_of_the_requests_fail(
    network, dataset, tmp_path
):
    url = f"s3://runs/{tmp_path.name}"
    store, names = ObjectStore(url), []
    for path in sorted(dataset.parent.iterdir()):
        names.append(f"data/{path.name}")
        store.put_file(names[-1], path)
    network.share = 0.5
    out, error = pull(url, tmp_path / "copy")
    assert error is None and f"{tmp_path / 'copy/data' / dataset.name}: intact" in out
    assert network.met["passed"] < network.met.total()
    for name in names:
        assert (tmp_path / "copy" / name).read_bytes() == (
            dataset.parent / Path(name).name
        ).read_bytes()
    assert "exists already" in str(pull(url, tmp_path / "copy")[1])


def test_nothing_of_a_damaged_dataset_or_of_no_folder_appears(dataset, tmp_path):
    path = dataset.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:-3])
    (tmp_path / "store").mkdir()
    assert "contains no objects" in str(pull(tmp_path / "store", tmp_path / "copy")[1])
    for one in sorted(dataset.parent.iterdir()):
        (tmp_path / "store" / one.name).write_bytes(one.read_bytes())
    out, error = pull(tmp_path / "store", tmp_path / "copy")
    assert error is not None and ".idx" in str(error) and not out
    assert sorted(one.name for one in tmp_path.iterdir() if "copy" in one.name) == []
