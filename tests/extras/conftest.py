from collections.abc import Iterator
from pathlib import Path

import pytest
from storage import Network, credentials, failing, s3_server


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the buckets that a real S3 server has: `runs` and `team`."""
    path = tmp_path_factory.mktemp("buckets")
    for name in ("runs", "team"):
        (path / name).mkdir()
    return path


@pytest.fixture(scope="module")
def endpoint(buckets: Path) -> Iterator[str]:
    """URL of the server."""
    with s3_server(buckets) as url:
        yield url


@pytest.fixture
def network(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Where S3 is found; fails nothing until it is told to."""
    with failing(endpoint, share=0.0) as network:
        for name, value in credentials(network.url).items():
            monkeypatch.setenv(name, value)
        yield network
