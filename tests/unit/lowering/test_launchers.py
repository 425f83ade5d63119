"""Which process of a run this is, by the variables of launchers."""

import json

import pytest

from lowering.errors import LoweringError
from lowering.xla.joining import Membership, membership

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
SLICES = {
    "TPU_WORKER_HOSTNAMES": "a0,a1", "TPU_WORKER_ID": "1", "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "first:8081",
}  # fmt: skip
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLICES, Membership(5, 6, "first:8476")),
        (SLICES | {"MEGASCALE_NUM_SLICES": "1"}, Membership(1, 2, "a0:8476")),
        (
            SLICES | {"TPU_WORKER_HOSTNAMES": "c0", "TPU_WORKER_ID": "0"},
            Membership(2, 3, "first:8476"),
        ),
        (TORCHRUN, Membership(1, 3, "host0:29500")),
        # The agent itself listens at MASTER_PORT.
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, Membership(1, 3, "host0:29501")),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Membership(2, 4, "127.0.0.1:8476")),
        (OPEN_MPI | {"MASTER_ADDR": "host0"}, Membership(2, 4, "host0:8476")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        (HYDRA | {"MPI_LOCALNRANKS": "2"}, Membership(0, 2, "127.0.0.1:8476")),
    ],
)
def test_the_variables_of_a_launcher_say_which_process_this_is(environ, expected):
    assert membership(environ) == expected


def test_a_coordinator_that_is_given_completes_what_mpi_does_not_say():
    assert membership(OPEN_MPI, coordinator="host7:1") == Membership(2, 4, "host7:1")
    with pytest.raises(LoweringError, match=r"set GRAPHTRAIN_COORDINATOR to HOST:PORT"):
        membership(OPEN_MPI)


def test_slices_that_do_not_say_where_rank_0_is_are_refused():
    environ = {key: SLICES[key] for key in SLICES if key != "MEGASCALE_COORDINATOR_ADDRESS"}
    with pytest.raises(LoweringError, match=r"MEGASCALE_NUM_SLICES = 3, but .* GRAPHTRAIN_COORD"):
        membership(environ)
    assert membership(environ, coordinator="host7:1") == Membership(5, 6, "host7:1")


def table(tmp_path, **server: object) -> dict[str, str]:
    servers = [
        {"server_id": "10.255.255.2", "device": [{"rank_id": "2"}, {"rank_id": "3"}]},
        {"server_id": "10.255.255.1", "device": [{"rank_id": "0"}, {"rank_id": "1"}]} | server,
    ]
    (tmp_path / "ranks.json").write_text(json.dumps({"server_list": servers}))
    return {"RANK_TABLE_FILE": str(tmp_path / "ranks.json")}


def test_a_rank_table_has_one_process_for_each_server_in_the_order_of_their_ranks(tmp_path):
    expected = Membership(1, 2, "10.255.255.1:8476")
    assert membership(table(tmp_path) | {"RANK_ID": "3"}) == expected
    local = table(tmp_path, host_ip="127.0.0.1")  # without RANK_ID, that of this host
    assert membership(local) == Membership(0, 2, "127.0.0.1:8476")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK_ID": "9"}, "no server with rank_id 9"),
        ({}, "set RANK_ID"),
        ({"RANK_TABLE_FILE": "none.json"}, "none.json: No such file"),
    ],
)
def test_a_rank_table_that_does_not_name_this_host_is_refused(tmp_path, change, words):
    with pytest.raises(LoweringError, match=words):
        membership(table(tmp_path) | change)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCHRUN | {"RANK": "x"}, "RANK = 'x' should be a number"),
        (TORCHRUN | {"RANK": "3"}, "RANK = 3 is out of range: 3 processes"),
    ],
)
def test_variables_that_contradict_are_refused(environ, words):
    with pytest.raises(LoweringError, match=words):
        membership(environ)


def test_a_damaged_rank_table_is_refused(tmp_path):
    (tmp_path / "ranks.json").write_text('{"server_list": [{"device": [{}]}]}')
    with pytest.raises(LoweringError, match="is not a rank table: KeyError: 'rank_id'"):
        membership({"RANK_TABLE_FILE": str(tmp_path / "ranks.json")})
