"""A run on a machine that has compiled nothing, from a store that others share."""

from dataclasses import replace

import pytest
from storage import credentials, failing, s3_server

pytest.importorskip("obstore")


def test_a_run_takes_its_programs_from_s3_that_fails_half_of_the_requests(
    place, tmp_path, monkeypatch
):
    cold = replace(place, cache=tmp_path / "cold")
    (tmp_path / "team").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("GRAPHTRAIN_TRUSTED_CACHES", str(place.cache))  # another user compiled it
    place.command("cache", "key", "new")
    with s3_server(tmp_path) as server, failing(server) as network:
        for name, value in credentials(network.url).items():
            monkeypatch.setenv(name, value)
        out, _ = place.command("cache", "push", "s3://team/programs", "config.toml")
        assert ": 3 programs, " in out and out.endswith(", 3 requests\n")
        monkeypatch.setenv("GRAPHTRAIN_SHARED_CACHE", "s3://team/programs")
        _, err = cold.command("run", "config.toml")
        assert "fetched 3 programs from s3://team/programs" in err
        assert network.met["passed"] < network.met.total()
    place.command("run", "config.toml", "--set", "run.directory=again")
    assert place.curve() == place.curve("again")
