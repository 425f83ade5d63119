"""Servers over the engine without a model, in a thread of the tests or as a process."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from toy_engine import ToyEngine, written_answer

from graphtrain.cli.chat import converse
from graphtrain.data.prepare.chat_templates import find_template
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.run.serving.chat_format import chat_format
from graphtrain.run.serving.chat_session import ChatSession
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.http.app import AppSettings, make_app
from graphtrain.run.serving.http.connection import TimedConnection
from graphtrain.run.serving.http.server import ServerSettings, serve
from graphtrain.run.serving.worker import OpenedModel, Worker

TOKENIZER = ByteTokenizer()


def toy_model(engine: ToyEngine, template: str | None = "chatml") -> OpenedModel:
    chat = template and chat_format(find_template(template, TOKENIZER), TOKENIZER, ())
    return OpenedModel(engine, TOKENIZER, (), chat or None)


@contextmanager
def served(
    engine: ToyEngine, template: str | None = "chatml", max_queue: int = 1000, **settings: Any
) -> Iterator[str]:
    """Serve an engine in a thread; yield the address."""
    worker = Worker(lambda: toy_model(engine, template), max_queue)
    worker.start()
    app = make_app(worker, AppSettings(model_name="toy", **settings))
    config = uvicorn.Config(app, http=TimedConnection, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            while not (server.started and worker.status == "ready"):
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            worker.stop()
            server.should_exit = server.force_exit = True
            thread.join(30)


def main() -> None:
    """Serve or chat, as the commands do: options of ToyEngine, and of the server."""
    options = json.loads(sys.argv[1])
    text = options.pop("text", None)
    answer = None if text is None else written_answer(text.encode())
    opening_seconds = options.pop("opening_seconds", 0.0)
    is_chat = options.pop("chat", False)
    settings = ServerSettings(model_name="toy", **options.pop("server", {}))

    def open_model() -> OpenedModel:
        time.sleep(opening_seconds)
        return toy_model(ToyEngine(answer=answer, **options))

    if is_chat:
        worker = Worker(open_model, max_queue=1)
        worker.start()
        converse(ChatSession(worker, SamplingParameters(max_tokens=1000), None))
        return
    serve(open_model, settings, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
