"""A server as a process: loading, signals, the end of a process without warning, and clients that
mean no good."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from toy_engine import ToyEngine
from toy_server import served, toy_model

from graphtrain.errors import GraphtrainError, MissingProgram
from graphtrain.run.serving.http.server import ServerSettings, serve

openai = pytest.importorskip("openai", reason="openai is not installed")
import httpx2 as httpx  # noqa: E402, comes with openai

SCRIPT = Path(__file__).with_name("toy_server.py")
HTTP = httpx.Client(timeout=20, limits=httpx.Limits(max_keepalive_connections=0))
TELL = {"prompt": "Tell:", "max_tokens": 40}


@contextmanager
def process(**options) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a server; yield it and its address once its model is open."""
    with started(**options) as child:
        assert child.stdout is not None
        yield child, child.stdout.readline().removeprefix("listening on ").strip()


@contextmanager
def started(**options) -> Iterator[subprocess.Popen]:
    """Start a server; yield it at once, and kill it in the end."""
    options.setdefault("server", {}).setdefault("port", 0)
    path = os.pathsep.join(str(SCRIPT.parents[up]) for up in (0, 1, 2))
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), json.dumps({"text": "word ", **options})],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def wait_until_ready(url: str) -> None:
    while HTTP.get(f"{url}/health").status_code != 200:
        time.sleep(0.02)


def test_sigterm_finishes_what_runs_and_refuses_the_rest():
    with process(seconds_per_call=0.05) as (child, url):
        wait_until_ready(url)
        with HTTP.stream("POST", f"{url}/v1/completions", json=TELL | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            while HTTP.get(f"{url}/health").json() != {"status": "draining"}:
                time.sleep(0.01)
            refused = HTTP.post(f"{url}/v1/completions", json=TELL)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "draining"
            rest = list(lines)
        assert child.wait(10) == 0
    events = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert "data: [DONE]" in rest


@pytest.mark.parametrize(("server", "signals"), [({}, 2), ({"drain_seconds": 0.2}, 1)])
def test_a_second_signal_and_the_drain_timeout_end_what_runs(server, signals):
    endless = {"seconds_per_call": 0.05, "context_length": 100_000}
    with process(server=server, **endless) as (child, url):
        wait_until_ready(url)
        long = TELL | {"max_tokens": 50_000, "stream": True}
        with HTTP.stream("POST", f"{url}/v1/completions", json=long) as answer:
            lines = answer.iter_lines()
            next(lines)
            for _ in range(signals):
                child.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            rest = [line for line in lines if line]
        assert child.wait(10) == 0
    assert json.loads(rest[-1][6:])["error"]["message"] == "the server is shutting down"


def test_a_killed_server_starts_again_on_its_port():
    with process() as (child, url):
        wait_until_ready(url)
        port = int(url.rpartition(":")[2])
        child.kill()
        child.wait()
        with process(server={"port": port}) as (_, again):
            assert again == url
            wait_until_ready(url)
            answer = HTTP.post(f"{url}/v1/completions", json=TELL).json()
    assert answer["choices"][0]["text"] == "word " * 8


def test_the_port_answers_while_the_model_is_loaded():
    with loading(opening_seconds=1.0) as (_, url):
        health = HTTP.get(f"{url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        refused = HTTP.post(f"{url}/v1/completions", json=TELL)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=5)
        answer = client.completions.create(model="toy", **TELL)  # tries again by itself
    assert answer.choices[0].text == "word " * 8


def test_a_port_in_use_is_one_line_that_says_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings(model_name="toy", port=taken.getsockname()[1])
        with pytest.raises(GraphtrainError, match=r"cannot listen on 127\.0\.0\.1 port .*--port"):
            serve(lambda: pytest.fail("opened"), settings, print)


def test_a_model_that_cannot_be_opened_ends_the_server_with_its_error():
    def fail():
        raise MissingProgram("no compiled decode step")

    lines = []
    with pytest.raises(MissingProgram, match="no compiled decode step"):
        serve(fail, ServerSettings(model_name="toy", port=0), lines.append)
    assert lines == []  # or else a client would be told of an address that never answers


def test_a_program_that_cannot_be_loaded_ends_the_server_before_a_request_needs_it():
    loaded = []

    def programs():
        loaded.append("prefill")
        yield
        raise GraphtrainError("the compiled decode step cannot be loaded")

    lines = []
    with pytest.raises(GraphtrainError, match="decode step cannot be loaded"):
        serve(
            lambda: replace(toy_model(ToyEngine()), finish=programs),
            ServerSettings(model_name="toy", port=0),
            lines.append,
        )
    assert loaded == ["prefill"]
    assert lines[0].startswith("listening on ") and lines[1].startswith("ready after ")


@pytest.fixture(scope="module")
def target():
    """Address of a server whose limits are low."""
    with served(ToyEngine(context_length=128), max_body=100_000) as url:
        yield url


@pytest.fixture(autouse=True)
def unharmed(request):
    """After each test with this server, a request is answered as before."""
    yield
    if "target" in request.fixturenames:
        url = request.getfixturevalue("target")
        answer = HTTP.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
WRONG = {
    "no JSON": "{",
    "no object": "[1]",
    "deep": "[" * 50_000,
    "deep messages": '{"messages": [' + '{"a": ' * 5000 + "1" + "}" * 5000 + "]}",
    "infinity": '{"prompt": "a", "temperature": Infinity}',
    "large exponent": '{"prompt": "a", "temperature": 1e999}',
    "large integer": '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
    "half a surrogate": r'{"prompt": "\ud800"}',
    "bytes": b'{"prompt": "\xff"}',
    "string for number": '{"prompt": "a", "max_tokens": "5"}',
    "number for flag": '{"prompt": "a", "stream": 1}',
    "fraction": '{"prompt": "a", "max_tokens": 1.5}',
    "negative": '{"prompt": "a", "max_tokens": -1}',
    "unknown": '{"prompt": "a", "best": 1}',
    "many unknown": json.dumps({f"field{index}": 1 for index in range(5000)}),
    "no prompt": "{}",
    "empty prompt": '{"prompt": ""}',
    "empty list": '{"prompt": []}',
    "mixed list": '{"prompt": ["a", 1]}',
    "token": '{"prompt": [257]}',
    "negative token": '{"prompt": [-1]}',
    "long prompt": json.dumps({"prompt": "a" * 90_000}),
    "bias of no token": '{"prompt": "a", "logit_bias": {"x": 1}}',
    "bias of another vocabulary": '{"prompt": "a", "logit_bias": {"257": 1}}',
    "empty stop": '{"prompt": "a", "stop": ""}',
    "long stop": json.dumps({"prompt": "a", "stop": "b" * 257}),
    "many choices": '{"prompt": "a", "n": 129}',
    "top_p": '{"prompt": "a", "top_p": 0}',
    "best_of": '{"prompt": "a", "n": 2, "best_of": 1}',
    "suffix": '{"prompt": "a", "suffix": "b"}',
    "stop token": '{"prompt": "a", "stop_token_ids": [257]}',
    "unknown stream option": '{"prompt": "a", "stream": true, "stream_options": {"usage": true}}',
}  # fmt: skip
WRONG_CHATS = {
    "no messages": {"messages": []},
    "string": {"messages": "Hi"},
    "no role": {"messages": [{"content": "Hi"}]},
    "number": {"messages": [{"role": "user", "content": 1}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    "noncharacter": {"messages": [{"role": "user", "content": "\ufdd0"}]},
    "tool choice": CHAT | {"tool_choice": "required"},
    "format": CHAT | {"response_format": {"type": "json_object"}},
    "top_logprobs": CHAT | {"top_logprobs": 2},
    "stream options": CHAT | {"stream_options": {"include_usage": True}},
    "too long": CHAT | {"max_tokens": 1000},
    "stop token": CHAT | {"stop_token_ids": [1, 257]},
    "unknown field of a message": {"messages": [{"role": "user", "content": "a", "tone": "b"}]},
    "ShareGPT's names": {"messages": [{"from": "human", "value": "a"}]},
    "name": {"messages": [{"role": "user", "content": "a", "name": "b"}]},
    "tool call": {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
    "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
    "kind of part": {"messages": [{"role": "user", "content": [{"type": "a", "text": "a"}]}]},
}  # fmt: skip


def post(url: str, body: str | bytes, path: str = "completions") -> httpx.Response:
    data = body if isinstance(body, bytes) else body.encode()
    headers = {"content-type": "application/json"}
    return HTTP.post(f"{url}/v1/{path}", content=data, headers=headers, timeout=5)


def assert_refused(answer: httpx.Response, status: int = 400) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 500


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_a_wrong_completion_is_refused_with_an_error_object(target, body):
    assert_refused(post(target, body))


@pytest.mark.parametrize("body", WRONG_CHATS.values(), ids=WRONG_CHATS)
def test_a_wrong_chat_is_refused_with_an_error_object(target, body):
    assert_refused(post(target, json.dumps(body), "chat/completions"))


REPEATED = {
    "field": ('{"prompt": "a", "max_tokens": 1, "prompt": "b"}', "prompt"),
    "spelled in two ways": (r'{"prompt": "a", "n": 1, "\u006e": 2}', "n"),
    "of an inner object": ('{"prompt": "a", "logit_bias": {"5": 1, "6": 1, "5": -1}}', "5"),
    "equal values": ('{"prompt": "a", "seed": 1, "seed": 1}', "seed"),
    "long": ('{"prompt": "a", "' + "k" * 999 + '": 1, "' + "k" * 999 + '": 2}', "k" * 80),
}


@pytest.mark.parametrize("body, key", REPEATED.values(), ids=REPEATED)
def test_a_key_that_is_repeated_is_refused_and_named(target, body, key):
    answer = post(target, body)
    assert_refused(answer)
    error = answer.json()["error"]
    assert error["message"] == f"key {key!r} is repeated; write it once"
    assert (error["param"], error["code"]) == (key, "duplicate_key")


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 5, ["a", 5], ["a"] * 17, "b" * 257])
def test_the_forms_of_stop_are_said(target, stop):
    answer = post(target, json.dumps({"prompt": "a", "stop": stop}))
    assert_refused(answer)
    error = answer.json()["error"]
    assert error["param"] == "stop"
    assert error["message"].startswith(
        "stop must be a string or a list of at most 16 strings, each of 1 to 256 characters"
    )


def test_large_bodies_are_refused_before_they_are_read(target):
    assert_refused(post(target, json.dumps({"prompt": "a" * 100_000})), 413)
    port = int(target.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        client.sendall(head + b"application/json\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in client.recv(1000)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(head + b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(1000):
            client.sendall(b"1000\r\n" + b"a" * 0x1000 + b"\r\n")
        answer = b"".join(iter(partial(client.recv, 10_000), b""))  # to the end, without a reset
        assert b" 413 " in answer and answer.endswith(b"}}")
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), 5) as client:
        client.sendall(head + b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:  # but the server does not listen for ever
            client.sendall(b"1000\r\n" + b"a" * 0x1000 + b"\r\n")
            time.sleep(0.02)


def test_bodies_of_many_clients_together_have_a_limit_until_they_are_answered(target):
    clients = begin_large_requests(target, 24)
    refused: list[socket.socket] = []
    while len(refused) < 8:  # 16 bodies of the largest size may be held
        refused = select.select(clients, [], [])[0]
    answers = [read_all(client) for client in refused]
    assert all(b" 503 " in answer and b"retry-after: 1" in answer for answer in answers)
    assert b'"code":"busy"' in answers[0]
    held = [client for client in clients if client not in refused]
    assert len(held) == 16
    for index, client in enumerate(held):
        if index % 2:
            client.close()
        else:
            client.sendall(b"}")
            assert b" 200 " in read_all(client)
    while not all(map(is_answered, begin_large_requests(target, 16))):
        pass  # the server has not seen yet that the others left


def begin_large_requests(url: str, count: int) -> list[socket.socket]:
    """Send requests of the largest size without their last byte."""
    body = b'{"prompt": "a", "max_tokens": 3, "user": "' + b"x" * 99_900 + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    port = int(url.rpartition(":")[2])
    clients = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]
    for client in clients:
        client.sendall(head + body[:-1])
    return clients


def is_answered(client: socket.socket) -> bool:
    with suppress(OSError):
        client.sendall(b"}")
        return b" 200 " in read_all(client)
    return False


def read_all(client: socket.socket) -> bytes:
    """Return what a server sends until it hangs up."""
    with client:
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_what_a_web_page_of_another_origin_can_send_is_refused(target):
    plain = HTTP.post(f"{target}/v1/completions", content='{"prompt": "a"}')
    assert_refused(plain, 415)
    rebound = HTTP.get(f"{target}/v1/models", headers={"host": "evil.example"})
    assert_refused(rebound, 421)
    assert HTTP.get(f"{target}/v1/models", headers={"host": "localhost:1"}).status_code == 200


def test_unknown_paths_and_methods_have_error_objects(target):
    assert_refused(HTTP.get(f"{target}/v2"), 404)
    assert_refused(HTTP.get(f"{target}/v1/completions"), 405)


def test_clients_that_send_or_read_too_slowly_are_cut_off(monkeypatch):
    from graphtrain.run.serving.http import connection

    monkeypatch.setattr(connection, "_HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connection, "_STALL_SECONDS", 0.3)
    engine = ToyEngine(context_length=300_000, tokens_per_call=2000, answer=lambda *_: 97)
    with served(engine) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=5) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ")
            assert slow.recv(1) == b""
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", port))
            body = json.dumps(
                {"prompt": "a", "max_tokens": 250_000, "stream": True, "logprobs": 20}
            ).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            head += f"application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            lazy.sendall(head.encode() + body)
            end = time.monotonic() + 8
            while time.monotonic() < end:
                metrics = HTTP.get(f"{url}/metrics").text
                if "graphtrain_sequences_cancelled_total 1.0" in metrics:
                    break
                time.sleep(0.05)
        assert "graphtrain_sequences_cancelled_total 1.0" in metrics


def test_hundreds_of_silent_connections_harm_nobody(target):
    port = int(target.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    try:
        for client in silent[::2]:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        answer = post(target, '{"prompt": "a", "max_tokens": 3}')
        assert answer.status_code == 200
    finally:
        for client in silent:
            client.close()


def test_requests_of_many_threads_and_hostile_ones_between_them(target):
    failures: list[str] = []

    def ask(index: int) -> None:
        for round in range(6):
            if index % 3 == 0:
                bodies = list(WRONG.values())
                assert_refused(post(target, bodies[(index + round) % len(bodies)]))
                continue
            body = json.dumps({"prompt": f"{index}", "max_tokens": 5, "seed": round})
            text = post(target, body).json()["choices"][0]["text"]
            if text != post(target, body).json()["choices"][0]["text"]:
                failures.append(text)

    threads = [threading.Thread(target=ask, args=[index]) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures


def test_the_log_of_a_server_names_its_address(capfd):
    with process() as (child, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        assert child.stdout is not None and re.match(r"ready after .* s", child.stdout.readline())


def test_ctrl_c_stops_an_answer_and_the_next_question_is_answered():
    options = {"chat": True, "context_length": 2000, "seconds_per_call": 0.02}
    path = os.pathsep.join(str(SCRIPT.parents[up]) for up in (0, 1, 2))
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), json.dumps({"text": "word ", **options})],
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"first:\n")
        child.stdin.flush()
        assert b"word word " in child.stdout.read(20)
        child.send_signal(signal.SIGINT)
        child.stdin.write(b"second:\n")
        child.stdin.flush()
        first = child.stdout.readline()
        assert b"word " in child.stdout.read(10)
        child.send_signal(signal.SIGINT)
        child.stdin.write(b"/quit\n")
        child.stdin.close()
        assert child.wait(10) == 0
    assert len(first) < 900


def test_a_terminal_has_history_ctrl_c_stops_an_answer_and_ctrl_d_ends():
    options = {"chat": True, "context_length": 3000, "seconds_per_call": 0.02, "text": "word "}
    path = os.pathsep.join(str(SCRIPT.parents[up]) for up in (0, 1, 2))
    terminal, its_end = pty.openpty()
    # A shell makes the terminal that of the new session, whose Ctrl-C is a signal.
    command = ["setsid", "--ctty", "--wait", sys.executable, str(SCRIPT), json.dumps(options)]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdin=its_end, stdout=its_end, stderr=its_end,
    ) as child:  # fmt: skip
        os.close(its_end)
        read_until(terminal, b"> ")
        os.write(terminal, b"first:\r")
        read_until(terminal, b"word word ")
        os.write(terminal, b"\x03")
        assert read_until(terminal, b"\n> ").count(b"word") < 200
        os.write(terminal, b"\x1b[A")  # the line before, to be edited
        assert b"first:" in read_until(terminal, b":")
        os.write(terminal, b" again:\r")
        read_until(terminal, b"word word")
        os.write(terminal, b"\x03")
        read_until(terminal, b"\n> ")
        os.write(terminal, b"\x04")
        read_until(terminal, b"\n")
        assert child.wait(10) == 0
    os.close(terminal)


def read_until(terminal: int, end: bytes) -> bytes:
    """Read what a terminal shows, up to these bytes."""
    shown = b""
    while end not in shown:
        assert select.select([terminal], [], [], 20)[0], shown
        shown += os.read(terminal, 10_000)
    return shown


def test_sigterm_ends_a_server_that_still_loads_at_once():
    with loading(opening_seconds=60.0) as (child, url):
        assert HTTP.get(f"{url}/health").json() == {"status": "loading"}
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
        assert child.stdout is not None and child.stdout.read() == ""


@contextmanager
def loading(opening_seconds: float) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a server; yield it and its address once its port is bound."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with started(opening_seconds=opening_seconds, server={"port": port}) as child:
        while not is_open(port):
            time.sleep(0.02)
        yield child, f"http://127.0.0.1:{port}"


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False
