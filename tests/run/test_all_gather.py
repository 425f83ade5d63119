"""Exchange of words between four processes through the service of rank 0."""

import json
import socket
import subprocess
import sys

RANKS, EXCHANGES = 4, 3

RANK = """
import json, sys
from lowering.machine.target import Target
from lowering.xla import distributed, joining, private

class Counted:
    def __init__(self, client):
        self.client, self.calls = client, []
    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.client, name)

address, count, rank, exchanges = sys.argv[1], *map(int, sys.argv[2:])
member = joining.Membership(rank, count, address)
joining.initialize(member, Target.parse("cpu:4x1"), join_timeout=60)
state = private.distributed_state()
client = state.client
counted = state.client = Counted(client)
words = [distributed.all_gather_text(f"{number} of {rank}") for number in range(exchanges)]
calls = counted.calls
stored = [key for key, _ in client.key_value_dir_get("graphtrain/")]
state.client = client
client.wait_at_barrier("stored", 60000)
print(json.dumps({"words": words, "calls": calls, "stored": stored}))
"""


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_every_rank_gets_all_words_with_a_few_calls_and_the_service_forgets_them():
    address = free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, address, str(RANKS), str(rank), str(EXCHANGES)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    told = [json.loads(process.communicate(timeout=200)[0]) for process in processes]
    for one in told:
        assert one["words"] == [
            [f"{number} of {rank}" for rank in range(RANKS)] for number in range(EXCHANGES)
        ]
    assert sum(len(one["calls"]) for one in told) == EXCHANGES * 3 * RANKS + EXCHANGES - 1
    last = {f"graphtrain/words/{EXCHANGES - 1}/{rank}" for rank in range(RANKS)}
    assert set(told[0]["stored"]) == last


# In a process of its own, which ends without waiting for the rank that does not take part.
ALONE = """
import os, sys, threading
from lowering.errors import LoweringError
from lowering.xla import distributed, private

service = private.start_distributed_service(sys.argv[1], 2)
clients = {}
def join(rank):
    clients[rank] = private.connect_distributed_client(sys.argv[1], rank, 60)
threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
[each.start() for each in threads]; [each.join() for each in threads]
state = private.distributed_state()
state.client, state.process_id, state.num_processes = clients[0], 0, 2
distributed._EXCHANGE_TIMEOUT = 1
try:
    distributed.all_gather_text("here")
except LoweringError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_rank_that_sends_nothing_is_named():
    done = subprocess.run(
        [sys.executable, "-c", ALONE, free_address()], capture_output=True, text=True, timeout=120
    )
    assert "rank 0 timed out waiting for rank 1: DEADLINE_EXCEEDED" in done.stdout, done.stderr
